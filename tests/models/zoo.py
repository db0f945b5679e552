"""Real models, small and without weights: each function makes one and its loss on an input of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Callable[[], Any]]

# PyPI's torchvision is built for CUDA. Beside a torch for CPUs its compiled operators are not loaded, none of
# which is used here, and it is imported all the same if these two are there.
if not hasattr(torch.ops.torchvision, "nms"):
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import diffusers
import kornia
import timm
import torchvision
import transformers
from torchvision.models.optical_flow import raft_small

_STAGES = ["stage2", "stage3", "stage4"]


def _resnet(kind: Any = transformers.ResNetConfig) -> Any:
    sizes = [16, 32, 64, 128]
    return kind(
        embedding_size=16, hidden_sizes=sizes, depths=[1] * 4, layer_type="basic", out_features=_STAGES
    )


def _swin() -> Any:
    return transformers.SwinConfig(
        image_size=128,
        embed_dim=24,
        depths=[1] * 4,
        num_heads=[1, 2, 4, 8],
        window_size=4,
        out_features=["stage1", *_STAGES],
    )


def _detr(layers: int) -> dict[str, Any]:
    """What the detectors' configurations have in common."""
    return {
        "d_model": 64,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "num_queries": 50,
    }


def _segmenter() -> dict[str, Any]:
    """And the segmenters'."""
    return {
        "backbone_config": _swin(),
        "hidden_dim": 64,
        "encoder_feedforward_dim": 64,
        "dim_feedforward": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "num_attention_heads": 8,
        "num_queries": 20,
    }


def deformable_detr() -> Made:
    """Three layers of encoder and decoder, each with one attention over four levels."""
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=_resnet(), **_detr(3)
    )
    model, image = transformers.DeformableDetrModel(config), torch.randn(1, 3, 256, 256)
    return model, lambda: model(image).last_hidden_state


def mask2former() -> Made:
    config = transformers.Mask2FormerConfig(feature_size=64, mask_feature_size=64, **_segmenter())
    model, image = transformers.Mask2FormerModel(config), torch.randn(1, 3, 128, 128)
    return model, lambda: model(image).transformer_decoder_last_hidden_state


def oneformer() -> Made:
    config = transformers.OneFormerConfig(
        mask_dim=64,
        conv_dim=64,
        text_encoder_width=64,
        text_encoder_num_layers=1,
        text_encoder_context_length=16,
        text_encoder_vocab_size=64,
        use_auxiliary_loss=False,
        **_segmenter(),
    )
    model, image = transformers.OneFormerModel(config), torch.randn(1, 3, 128, 128)
    task = torch.randint(0, 10, (1, config.task_seq_len))
    return model, lambda: model(image, task).transformer_decoder_object_queries


def grounding_dino() -> Made:
    text = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    config = transformers.GroundingDinoConfig(backbone_config=_swin(), text_config=text, **_detr(3))
    model, image = transformers.GroundingDinoModel(config), torch.randn(1, 3, 128, 128)
    words = torch.tensor([[37, 7, 8, 12, 9]])
    return model, lambda: model(image, words).last_hidden_state


def rt_detr() -> Made:
    config = transformers.RTDetrConfig(
        backbone_config=_resnet(transformers.RTDetrResNetConfig),
        encoder_in_channels=[32, 64, 128],
        encoder_hidden_dim=64,
        decoder_in_channels=[64] * 3,
        feat_strides=[8, 16, 32],
        **_detr(3),
    )
    model, image = transformers.RTDetrModel(config), torch.randn(1, 3, 256, 256)
    return model, lambda: model(image).last_hidden_state


def wav2vec2() -> Made:
    config = transformers.Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(64,) * 3,
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    model, sound = transformers.Wav2Vec2Model(config), torch.randn(1, 16000)
    return model, lambda: model(sound).last_hidden_state


def unet() -> Made:
    model = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    noise, text = torch.randn(1, 4, 32, 32), torch.randn(1, 7, 32)
    return model, lambda: model(noise, 3, text).sample


def autoencoder_kl() -> Made:
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    image = torch.randn(1, 3, 128, 128)
    return model, lambda: model(image).sample


def timm_resnet50_gn() -> Made:
    return _classifier(timm.create_model("resnet50_gn", num_classes=10), 96)


def timm_convnext_atto() -> Made:
    return _classifier(timm.create_model("convnext_atto", num_classes=10), 96)


def torchvision_resnet18_gn() -> Made:
    norm = lambda channels: nn.GroupNorm(8, channels)  # noqa: E731 - the layer is made by a call
    return _classifier(torchvision.models.resnet18(norm_layer=norm, num_classes=10), 128)


def raft() -> Made:
    model = raft_small()
    first, second = torch.randn(2, 1, 3, 128, 128)
    return model, lambda: model(first, second, num_flow_updates=4)[-1]


def kornia_warps() -> Made:
    model, image = _Warps(), torch.randn(2, 3, 98, 98)
    return model, lambda: model(image)


class _Warps(nn.Module):
    """A learned homography, then a learned flow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.homography = nn.Parameter(torch.eye(3) + 0.01 * torch.randn(3, 3))
        self.flow = nn.Parameter(0.3 * torch.randn(96, 96, 2))

    def forward(self, image: Any) -> Any:
        batch = image.shape[0]
        straight = kornia.geometry.warp_perspective(
            self.stem(image), self.homography.expand(batch, 3, 3), (96, 96)
        )
        x, y = (kornia.utils.create_meshgrid(96, 96, False) + self.flow).expand(batch, -1, -1, -1).unbind(-1)
        return kornia.geometry.remap(straight, x, y)


def _classifier(model: nn.Module, size: int) -> Made:
    images = torch.randn(2, 3, size, size)
    return model, lambda: model(images)


MODELS = (
    *(deformable_detr, mask2former, oneformer, grounding_dino, rt_detr, wav2vec2, unet, autoencoder_kl),
    *(timm_resnet50_gn, timm_convnext_atto, torchvision_resnet18_gn, raft, kornia_warps),
)

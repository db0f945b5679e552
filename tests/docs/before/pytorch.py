import torch

from npugrad_client import Client

client = Client("127.0.0.1:50051", timeout_s=60.0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), torch.nn.GroupNorm(4, 16), torch.nn.Flatten())
loader = [(torch.randn(2, 3, 32, 48), torch.zeros(2))] * 2
optimizer = torch.optim.SGD(model.parameters(), 0.1)
levels = torch.tensor([[8, 8], [4, 4]])
operands = (
    torch.randn(2, 80, 4, 16, requires_grad=True),
    levels,
    torch.tensor([0, 64]),
    torch.rand(2, 5, 4, 2, 4, 2, requires_grad=True),
    torch.rand(2, 5, 4, 2, 4, requires_grad=True),
)


def criterion(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return (out.mean(1) - labels).square().sum()

// Every operator there is: one line each. Its kernel lies in the file of its name.
//
//   OPERATOR(name of the record, bits of the tensors in the record's order that may have any strides)
#ifndef OPERATOR
#error "define OPERATOR(name, strided) before this is included"
#endif
OPERATOR(grid_sampler_2d_backward, 0x07)
OPERATOR(group_norm_backward, 0x1f)
OPERATOR(multi_scale_deformable_attention_grad, 0x00)
OPERATOR(fused_floyd_attention_grad, 0x3ff)
OPERATOR(layer_norm_backward, 0x3f)
OPERATOR(grid_sampler_3d_backward, 0x07)
#undef OPERATOR

"""Float64 NumPy references: one module per operator, one public function `reference` in each.

`reference(inputs, attrs, outputs)` takes validated operands and attributes by their Python names, computes
entirely in float64 and fills every element of the arrays in `outputs`; masked-out outputs are not in the
mapping. All work in blocks of bounded scratch memory (`_blocks`), so tensors may have any size and strides.
"""

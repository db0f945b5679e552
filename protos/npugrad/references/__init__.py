"""Float64 NumPy references: one module per operator, one public function `reference` in each.

`reference(inputs, attrs, outputs)` takes validated operands and attributes by their Python names, computes
wholly in float64 and fills every element of the arrays in `outputs`; an output that is masked out is not in
the mapping. All of them work in blocks of bounded scratch memory (`_blocks`), so a tensor of any size and of
any strides will do.
"""

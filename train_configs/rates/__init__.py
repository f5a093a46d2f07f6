"""One learning rate for all R and widths: `model.branch_scale` and `model.base_width`, on trial."""

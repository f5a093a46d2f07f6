"""A scaling law on two cores: a layer of four widths at R = 1, 2, 4, 8."""

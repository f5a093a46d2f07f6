"""Memory and speed of GPUs, as the vendors' data sheets have them."""

import pytest

from titan_loop.distributed.devices import USABLE_SHARE, get_device
from titan_loop.errors import UserError


@pytest.mark.parametrize(
    ("name", "gib", "teraflops", "fp32_teraflops"),
    [
        ("a100-40gb", 39.4, 312, 19.5),
        ("a100-80gb", 79.2, 312, 19.5),
        ("h100-80gb", 79.2, 989, 67),
        ("h200-141gb", 139.8, 989, 67),
        ("b200-180gb", 178.4, 2250, 75),
    ],
)
def test_a_data_sheet(name, gib, teraflops, fp32_teraflops):
    device = get_device(name)
    assert device.memory_bytes / 1024**3 == pytest.approx(gib, rel=1e-12)
    assert device.peak_flops / 1e12 == pytest.approx(teraflops, rel=1e-12)
    assert device.fp32_peak_flops / 1e12 == pytest.approx(fp32_teraflops, rel=1e-12)


def test_a_step_may_take_nine_tenths_of_the_memory():
    assert USABLE_SHARE == 0.9


def test_an_unknown_gpu_names_the_nearest():
    with pytest.raises(UserError, match="--gpu h100 is unknown; nearest: h100-80gb"):
        get_device("h100")

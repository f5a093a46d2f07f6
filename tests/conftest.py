"""What every test session shares: the process pool, required markers, and the counts per marker.

`TITAN_LOOP_REQUIRE=multiprocess,slurm` names markers whose tests must run: a skipped test with such
a marker fails, and so does a session that ran none.
"""

import gc
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist import is_xdist_worker

# The same tests on every machine, on its CPU; TITAN_LOOP_REQUIRE=gpu shows them a GPU. It has to be
# said before torch looks.
if "gpu" not in os.environ.get("TITAN_LOOP_REQUIRE", "").split(","):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Threads spin on each other where others run beside them, and tests start many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In every process that compiles, torch otherwise asks the compiler about every vector extension of
# the CPU, which takes seven seconds. 0 is for compilers that are too old for the CPU.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import titan_loop.compat as compat  # before any torchtitan module

from tests.support.multiprocess import GlooPool, close_pools, get_pool
from titan_loop.storage import transient

compat.use_batch_scheduling()  # the pools' ranks and all other processes inherit it
gc.disable()  # until the tests are collected, a fifth of whose time it would take

# How long an example takes is the machine's affair.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

MARKERS = (
    "browser",
    "effects",
    "engines",
    "float8",
    "gpu",
    "hf4",
    "hf5",
    "hostile",
    "multi_gpu",
    "multiprocess",
    "network",
    "slow",
    "slurm",
    "tokenizers",
    "vllm",
)
REQUIRED = frozenset(filter(None, os.environ.get("TITAN_LOOP_REQUIRE", "").split(",")))

outcomes: dict[str, Counter[str]] = {}
failures: list[str] = []
seconds: Counter[str] = Counter()


@pytest.fixture(scope="session", autouse=True)
def rehearsals_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither read nor write the user's own cache of rehearsals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITAN_LOOP_REHEARSAL_CACHE", str(tmp_path_factory.mktemp("rehearsals")))
        yield


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Callable[[int], GlooPool]]:
    """Return `get_pool`: `gloo_pool(2).run(case, *args)`."""
    yield get_pool
    close_pools()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are injected, so nothing gets better by waiting."""
    monkeypatch.setattr(transient, "WAIT_SECONDS", 0.001)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small prepared source for all tests that train."""
    from tests.support.tiny import tiny_source  # torchtitan's trainer imports slowly

    return tiny_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """Fail a test that leaves a process group to those after it, which would believe in ranks."""
    import torch.distributed as dist

    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
        pytest.fail("leaves a process group behind: take the fixture `alone`")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one that leaves no process group and no environment behind."""
    import torch.distributed as dist

    compat.skip_final_pause()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    saved = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.enable()  # torchtitan turns it off, and trainers with all their open files stay
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU's plain vectors: for each extension, torch compiles and starts a program."""
    from torch._inductor.cpu_vec_isa import VecISA

    from titan_loop.distributed.compiler import missing_compiler

    if missing_compiler("cpu") is not None:
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.setattr(VecISA, "check_build", lambda *_: False)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server that speaks S3's protocol, on this machine."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, s3_server: str) -> Iterator[str]:
    """A bucket that is new for every test."""
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sEcReT-kEy-0123456789")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file_system = fsspec.filesystem("s3", skip_instance_cache=True)
    file_system.mkdir("bucket")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield "s3://bucket"
    file_system.rm("bucket", recursive=True)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def pytest_configure() -> None:
    unknown = REQUIRED.difference(MARKERS)
    if unknown:
        raise pytest.UsageError(
            f"TITAN_LOOP_REQUIRE={','.join(sorted(unknown))} is no marker; "
            f"known: {', '.join(MARKERS)}"
        )


@pytest.hookimpl(tryfirst=True)  # before -m deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gloo_pool" in getattr(item, "fixturenames", ()):
            item.add_marker("multiprocess")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare what imports made: every run collects garbage, and there is none in it."""
    # Not where a few files are tested, which may need little.
    if is_xdist_worker(session) and len(session.items) > 500:
        import tests.support.preloaded  # noqa: F401
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # Python's 700 take a tenth of the tests' time


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    names = [name for name in MARKERS if item.get_closest_marker(name)]
    required = REQUIRED.intersection(names)
    if report.skipped and required and "wasxfail" not in vars(report):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}, but {', '.join(required)} is required here"
    report.markers = names  # travels with the report, also from a worker of pytest-xdist
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid.partition("::")[0]] += report.duration
    if report.when == "call" or report.outcome != "passed":
        # A test whose worker died has a report that was not made above.
        for name in getattr(report, "markers", None) or ["unmarked"]:
            outcomes.setdefault(name, Counter())[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or nanobind takes it for leaks
    if session.config.option.collectonly or is_xdist_worker(session):
        return  # a worker sees only its part
    failures.extend(f"{name}: required, but no such test ran" for name in REQUIRED - set(outcomes))
    if failures and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(seconds) > 10:
        terminalreporter.section("ten slowest files")
        for file, taken in seconds.most_common(10):
            terminalreporter.write_line(f"{taken:6.1f} s  {file}")
    terminalreporter.section("tests per marker")
    for name, counts in sorted(outcomes.items()):
        text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.write_line(f"{name:14} {text}")
    for failure in failures:
        terminalreporter.write_line(f"FAILED {failure}", red=True)

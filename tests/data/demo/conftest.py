"""The corpora of these tests take from one list of files, which takes seconds to make."""

import pytest

from titan_loop.data.demo import local_python


@pytest.fixture(scope="session", autouse=True)
def one_list_of_files():
    distributions = local_python.installed_distributions()
    files = local_python.python_files(distributions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_python, "installed_distributions", lambda: distributions)
        patch.setattr(local_python, "python_files", lambda _: files)
        yield

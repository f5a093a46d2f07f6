# For editors and type checkers: the module itself imports `load` on first use.
from titan_loop.interactive import load as load

__version__: str

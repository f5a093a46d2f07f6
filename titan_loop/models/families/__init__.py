"""The families of looped models, one file each: `../family.py` is their protocol and registry."""

"""The recurrent parts of a Mamba-2 layer."""

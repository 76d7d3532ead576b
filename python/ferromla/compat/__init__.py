"""Interfaces of other libraries, by the kernels of this one, for programs that call those."""

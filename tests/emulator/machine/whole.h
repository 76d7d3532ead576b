// All of the machine, for programs of one translation unit.
#pragma once
#include "machine/machine.cpp"
#include "machine/memory.cpp"
#include "machine/products.cpp"

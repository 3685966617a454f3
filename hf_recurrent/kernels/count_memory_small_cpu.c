/* The count memory with fewer cells, weights and refinements, for learners in C with little memory. */
#define SMALL
#include "count_memory_cpu.c"

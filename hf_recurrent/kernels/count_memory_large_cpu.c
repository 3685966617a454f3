/* The count memory with more contexts and sets of weights: better predictions in about twice the time. */
#define LARGE
#include "count_memory_cpu.c"

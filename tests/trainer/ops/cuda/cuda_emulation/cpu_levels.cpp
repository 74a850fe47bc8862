/* Replaces csrc/common/cpu/level.cpp in a library without kernels for the CPU. */
extern "C" int llmctl_cpu_level(void) { return 0; }
extern "C" int llmctl_cpu_set_level(int) { return 0; }

"""A Cortex-M4F and a Cortex-M7 in QEMU: programs that print through semihosting."""

import shutil
import subprocess
from pathlib import Path

import pytest

CORTEX_COMPILER, QEMU = shutil.which("arm-none-eabi-gcc"), shutil.which("qemu-system-arm")
needs_cortex_compiler = pytest.mark.skipif(CORTEX_COMPILER is None, reason="arm-none-eabi-gcc is not installed")
needs_cortex = pytest.mark.skipif(not (CORTEX_COMPILER and QEMU), reason="arm-none-eabi-gcc or QEMU is not installed")

_COMMON = ["-mthumb", "-mfloat-abi=hard", "-ffunction-sections"]
CORTEX = {
    "cortex-m4": ["-mcpu=cortex-m4", "-mfpu=fpv4-sp-d16", *_COMMON],
    "cortex-m7": ["-mcpu=cortex-m7", "-mfpu=fpv5-d16", *_COMMON],
}
# Of each, the beginning of its large memory, 16 MB. The small one has 4 MB; a program whose stack lies beyond it locks
# up in its first function.
_BOARDS = {"cortex-m4": ("mps2-an386", 0x21000000), "cortex-m7": ("mps2-an500", 0x60000000)}
# One nanosecond of the board's time per instruction; its SysTick timer counts at 25 MHz.
INSTRUCTIONS_PER_TICK = 40


def run_on_cortex(folder: Path, part: str, arguments: list[str]) -> str:
    """What a program prints; `arguments` of the compiler have its files."""
    (folder / "start.c").write_text(START)
    board, large_memory = _BOARDS[part]
    (folder / "memory.ld").write_text(MEMORY.replace("LARGE_MEMORY", hex(large_memory)))
    link = ["-nostartfiles", "--specs=rdimon.specs", "-Wl,--gc-sections", "-T", "memory.ld"]
    command = [CORTEX_COMPILER, "-std=c99", *CORTEX[part], *link, *arguments, "start.c", "-o", "main.elf", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    machine = ["-machine", board, "-nographic", "-monitor", "none", "-serial", "none", "-icount", "shift=0"]
    command = [QEMU, *machine, "-semihosting", "-kernel", "main.elf"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


START = """
extern unsigned long stack_top[], data_from[], data_begin[], data_end[], bss_begin[], bss_end[];
extern int main(void);
extern void exit(int) __attribute__((noreturn));
extern void initialise_monitor_handles(void);
void start(void) {
    *(volatile unsigned long *)0xE000ED88UL |= 0xFUL << 20; /* the floating-point unit */
    for (unsigned long *to = data_begin, *from = data_from; to < data_end;) *to++ = *from++;
    for (unsigned long *to = bss_begin; to < bss_end;) *to++ = 0;
    initialise_monitor_handles();
    exit(main());
}
void _init(void) {}
void _fini(void) {}
__attribute__((section(".vectors"), used)) static void *const vectors[] = {stack_top, start};
"""

MEMORY = """
MEMORY { FLASH (rx) : ORIGIN = 0, LENGTH = 2M  RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 4M
  LARGE (rw) : ORIGIN = LARGE_MEMORY, LENGTH = 16M }
ENTRY(start)
SECTIONS {
  .text : { KEEP(*(.vectors)) *(.text*) *(.rodata*) . = ALIGN(8); } > FLASH
  .ARM.exidx : { *(.ARM.exidx*) } > FLASH
  data_from = ALIGN(LOADADDR(.ARM.exidx) + SIZEOF(.ARM.exidx), 8);
  .data : AT(data_from) { data_begin = .; *(.data*) . = ALIGN(8); data_end = .; } > RAM
  .heap (NOLOAD) : { end = .; . += 64K; } > RAM
  .bss : { bss_begin = .; *(.bss*) *(COMMON) . = ALIGN(8); bss_end = .; } > LARGE
  stack_top = ORIGIN(RAM) + LENGTH(RAM);
}
"""

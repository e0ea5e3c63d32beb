package faulty

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/prometheus/procfs"

	"github.com/stratakube/strata/internal/process"
)

// readClock replaces __vdso_clock_gettime(clock in edi, result in rsi). The offset is placed behind
// the code.
var readClock = []byte{
	0xB8, 0xE4, 0x00, 0x00, 0x00, // mov  eax, 228           clock_gettime
	0x0F, 0x05, //                   syscall
	0x85, 0xFF, //                   test edi, edi           0 is the wall clock
	0x75, 0x0A, //                   jnz  ret
	0x48, 0x8B, 0x0D, 0, 0, 0, 0, // mov  rcx, [rip+...]     see plant
	0x48, 0x01, 0x0E, //             add  [rsi], rcx         seconds
	0xC3, //                         ret
}

const (
	// position of the mov's operand, which is relative to the next instruction
	readClockOperand = 14
	readClockNext    = 18
)

// plant replaces the code that reads a process's clocks.
func plant(pid int) (o offset, err error) {
	base, image, err := vdso(pid)
	if err != nil {
		return o, err
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return o, fmt.Errorf("vDSO: %w", err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return o, fmt.Errorf("vDSO: %w", err)
	}
	for _, s := range symbols {
		if s.Name != "__vdso_clock_gettime" {
			continue
		}
		// aligned, for atomic writes during reads
		number := (s.Value + uint64(len(readClock)) + 7) &^ 7
		if number+8 > s.Value+s.Size {
			return o, fmt.Errorf("vDSO: %s takes %d bytes only", s.Name, s.Size)
		}
		code := bytes.Clone(readClock)
		binary.LittleEndian.PutUint32(code[readClockOperand:], uint32(number-s.Value-readClockNext))
		memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
		if err != nil {
			return o, err
		}
		if _, err := memory.WriteAt(code, base+int64(s.Value)); err != nil {
			return o, errors.Join(err, memory.Close())
		}
		return offset{memory, base + int64(number)}, nil
	}
	return o, errors.New("vDSO: it does not read clocks")
}

// vdso returns the base address and the content of a process's vDSO.
func vdso(pid int) (base int64, image []byte, err error) {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return 0, nil, err
	}
	maps, err := process.ProcMaps()
	if err != nil {
		return 0, nil, err
	}
	for _, m := range maps {
		if m.Pathname != "[vdso]" {
			continue
		}
		memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
		if err != nil {
			return 0, nil, err
		}
		defer memory.Close()
		image = make([]byte, m.EndAddr-m.StartAddr)
		_, err = memory.ReadAt(image, int64(m.StartAddr))
		return int64(m.StartAddr), image, err
	}
	return 0, nil, errors.New("it has no vDSO")
}

func (o offset) set(by time.Duration) error {
	var seconds [8]byte
	binary.LittleEndian.PutUint64(seconds[:], uint64(int64(by/time.Second)))
	_, err := o.memory.WriteAt(seconds[:], o.at)
	return err
}

// ClockError returns the reason why this platform cannot set clocks of processes; nil if it can.
var ClockError = sync.OnceValue(func() error {
	c := &Clock{}
	defer c.Close()
	p, err := process.Start(process.Spec{Name: "true", Path: "true", Log: os.DevNull, Prepare: c.Prepare})
	if err != nil {
		return err
	}
	return p.ExitError()
})

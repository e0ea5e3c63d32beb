package target

import (
	"bytes"
	"runtime/pprof"
	"strings"
	"testing"
)

func TestParseHeap_ReadsRuntimeProfile(t *testing.T) {
	var profile bytes.Buffer
	if err := pprof.Lookup("heap").WriteTo(&profile, 1); err != nil {
		t.Fatal(err)
	}
	var s State
	if err := s.parseHeap(&profile); err != nil || s.Heap == 0 || s.Stacks == 0 {
		t.Fatalf("%+v, %v", s, err)
	}
	err := s.parseHeap(strings.NewReader("# Stack = 12 / 34\n# HeapAlloc = 56\n# HeapIdle = 5\n# HeapInuse = 67\n"))
	if err != nil || s.Heap != 67 || s.Stacks != 12 {
		t.Fatalf("%+v, %v", s, err)
	}
	for _, broken := range []string{"", "# HeapInuse = 67\n", "# Stack = 12 / 34\n# HeapInuse = x\n"} {
		if err := s.parseHeap(strings.NewReader(broken)); err == nil {
			t.Errorf("%q is accepted", broken)
		}
	}
}

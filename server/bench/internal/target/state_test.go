package target

import (
	"bytes"
	"runtime/pprof"
	"strings"
	"testing"
)

func TestStateIsReadFromWhatTheRuntimeWrites(t *testing.T) {
	var profile bytes.Buffer
	if err := pprof.Lookup("heap").WriteTo(&profile, 1); err != nil {
		t.Fatal(err)
	}
	heap, stacks, err := parseHeap(&profile)
	if err != nil || heap == 0 || stacks == 0 {
		t.Fatalf("%d, %d, %v", heap, stacks, err)
	}
	heap, stacks, err = parseHeap(strings.NewReader("# Stack = 12 / 34\n# HeapIdle = 5\n# HeapInuse = 67\n"))
	if err != nil || heap != 67 || stacks != 12 {
		t.Fatalf("%d, %d, %v", heap, stacks, err)
	}
	for _, broken := range []string{"", "# HeapInuse = 67\n", "# Stack = 12 / 34\n# HeapInuse = x\n"} {
		if _, _, err := parseHeap(strings.NewReader(broken)); err == nil {
			t.Errorf("%q is accepted", broken)
		}
	}
}

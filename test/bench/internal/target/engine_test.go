package target

import (
	"testing"
	"time"
)

func TestKlogTime_LogLine_ReturnsItsTime(t *testing.T) {
	now := time.Date(2031, time.March, 4, 0, 0, 0, 0, time.Local)
	got, err := klogTime(`I0303 21:19:34.123456   12345 mirror.go:12] "History restored" revisions=5`, now)
	if want := time.Date(2031, time.March, 3, 21, 19, 34, 123_456_000, time.Local); err != nil || !got.Equal(want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	for _, line := range []string{"", "panic: no", `{"ts":1,"msg":"a line of another format"}`} {
		if _, err := klogTime(line, now); err == nil {
			t.Errorf("%q has a time", line)
		}
	}
}

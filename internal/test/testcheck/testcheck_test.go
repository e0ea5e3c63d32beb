package testcheck

import (
	"errors"
	"testing"
)

type recorder struct{ fatal []any }

func (*recorder) Helper()             {}
func (r *recorder) Fatal(args ...any) { r.fatal = args }

func TestNoError_OfError_IsFatal(t *testing.T) {
	var r recorder
	if NoError(&r, nil); r.fatal != nil {
		t.Errorf("without an error: %v", r.fatal)
	}
	err := errors.New("failure")
	if NoError(&r, err); len(r.fatal) != 1 || r.fatal[0] != err {
		t.Errorf("got %v", r.fatal)
	}
}

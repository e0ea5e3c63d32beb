package chaos

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// A register is one key as clients see it: an object, or none. All requests for the key are
// operations on it; a consistent list, whole or in pages, reads every key of its collection.

// register is the state of a register. The revision is that of the last change or deletion.
type register struct {
	state state
	last  int64
}

// step is one operation on a register.
type step struct {
	what    string
	kind    kind
	outcome outcome
	want    state // preconditions
	got     state // the state read or written; of a deletion the deleted state
	at      int64 // revision of a write; of a read the highest that it may have seen, 0 if unknown
}

// registers is the porcupine model: the state, and whether a step may follow it.
var registers = porcupine.Model{
	Init: func() any { return register{} },
	Step: func(from, input, _ any) (bool, any) {
		r, s := from.(register), input.(*step)
		to, ok := r.next(s)
		return ok, to
	},
	Equal: func(a, b any) bool { return a == b },
	Hash:  func(s any) uint64 { return uint64(s.(register).last) },
	DescribeOperation: func(input, _ any) string {
		s := input.(*step)
		return fmt.Sprintf("%s: %v %s@%d", s.what, s.outcome, s.got.value, s.at)
	},
	DescribeState: func(s any) string {
		r := s.(register)
		return fmt.Sprintf("%s@%d", r.state.value, r.last)
	},
}

// next returns the state after a step, and whether the step is possible in this state.
func (r register) next(s *step) (register, bool) {
	met := (s.want.uid == "" || s.want.uid == r.state.uid) && (s.want.revision == 0 || s.want.revision == r.state.revision)
	switch s.outcome {
	case missing:
		return r, !r.state.exists() && (s.at == 0 || r.last <= s.at)
	case exists:
		return r, r.state.exists()
	case conflict:
		return r, r.state.exists() && !met
	}
	switch s.kind {
	case get:
		return r, r.state == s.got
	case create:
		return register{s.got, s.at}, !r.state.exists() && s.at > r.last
	case update:
		return register{s.got, s.at}, r.state.exists() && met && s.got.uid == r.state.uid && s.at > r.last
	default:
		return register{state{}, s.at}, r.state.exists() && met && s.got.uid == r.state.uid && s.at > r.last
	}
}

// checkLinearizable judges the history of each key separately: linearizability is local.
func checkLinearizable(histories map[key][]porcupine.Operation, bound time.Duration, report func(k key, result porcupine.CheckResult, info porcupine.LinearizationInfo)) {
	var group sync.WaitGroup
	seats := make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))
	for k, history := range histories {
		seats <- struct{}{}
		group.Go(func() {
			defer func() { <-seats }()
			if result := porcupine.CheckOperationsTimeout(registers, history, bound); result != porcupine.Ok {
				_, info := porcupine.CheckOperationsVerbose(registers, history, bound)
				report(k, result, info)
			}
		})
	}
	group.Wait()
}

// operation returns an operation with the call and return times of its origin; one that has not
// returned may take effect at any time.
func operation(from origin, ended bool, s *step) porcupine.Operation {
	o := porcupine.Operation{ClientId: from.client, Input: s, Call: int64(from.call), Return: int64(from.ret)}
	if !ended {
		o.Return = math.MaxInt64
	}
	return o
}

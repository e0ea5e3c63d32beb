package readpath

import (
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const testInFlight = 64 << 20

func TestSmallListsNeverWaitForTheirTurn(t *testing.T) {
	f := newInFlight(testInFlight)
	for range 2 {
		if share, err := f.enter(t.Context(), testInFlight); share == nil || err != nil {
			t.Fatalf("%v, %v: two lists of any size are under way at least", share, err)
		}
	}
	if share, err := f.enter(t.Context(), freeInFlightBytes); share != nil || err != nil {
		t.Errorf("%v, %v: a small list does not count", share, err)
	}
}

func TestListsWaitForTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newInFlight(testInFlight)
		first, _ := f.enter(t.Context(), testInFlight)
		second, _ := f.enter(t.Context(), testInFlight)
		time.AfterFunc(inFlightWait-time.Second, first.leave)
		third, err := f.enter(t.Context(), testInFlight)
		if err != nil {
			t.Fatalf("a list has ended after %v, and the next: %v", inFlightWait-time.Second, err)
		}
		began := time.Now()
		_, err = f.enter(t.Context(), testInFlight)
		if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsTooManyRequests(err) || !ok || seconds <= 0 {
			t.Errorf("a list whose turn does not come: %v, want 429 and when to come again", err)
		}
		if waited := time.Since(began); waited != inFlightWait {
			t.Errorf("it has waited for %v, want %v", waited, inFlightWait)
		}
		for range 2 { // the second time does nothing
			second.leave()
			third.leave()
		}
		if !f.room.TryAcquire(testInFlight) || f.room.TryAcquire(1) {
			t.Error("what is free when all have left is not what there was")
		}
	})
}

// stalling is a response that takes nothing until it is told to.
type stalling struct {
	http.ResponseWriter
	goOn chan struct{}
}

func (s stalling) Write(p []byte) (int, error) {
	<-s.goOn
	return s.ResponseWriter.Write(p)
}

func TestAClientThatDoesNotReadGivesItsTurnBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newInFlight(testInFlight)
		reader, _ := f.enter(t.Context(), testInFlight)
		stalled, _ := f.enter(t.Context(), testInFlight)
		response := stalling{httptest.NewRecorder(), make(chan struct{})}
		var writing sync.WaitGroup
		writing.Go(func() {
			if _, err := stalled.writer(response).Write([]byte("a")); err != nil {
				t.Error(err)
			}
		})
		w := reader.writer(httptest.NewRecorder())
		for range 10 { // who reads keeps it, however long that takes
			if _, err := w.Write([]byte("a")); err != nil {
				t.Error(err)
			}
			time.Sleep(slowWrite / 2)
		}
		next, err := f.enter(t.Context(), testInFlight)
		if err != nil {
			t.Fatalf("beside a client that does not read: %v", err)
		}
		if f.room.TryAcquire(1) {
			t.Error("a client that reads has lost its turn")
		}
		close(response.goOn)
		writing.Wait()
		reader.leave()
		stalled.leave()
		next.leave()
	})
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"
)

const childEnv = "CONFORMANCE_TEST_CHILD"

// TestMain lets the test binary stand for a program that this one starts.
func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "":
		os.Exit(m.Run())
	case "fails":
		fmt.Println("no such flag")
		os.Exit(3)
	case "waits":
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		fmt.Println("ready")
		<-term
	case "deaf":
		never := make(chan os.Signal, 1)
		signal.Notify(never, syscall.SIGHUP)
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ready")
		<-never
	}
}

func child(t *testing.T, how string) *process {
	t.Helper()
	t.Setenv(childEnv, how)
	p, err := start(t.TempDir(), how, nil, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.stop(os.Kill, time.Minute) })
	return p
}

func saysReady(p *process) func(context.Context) error {
	return func(context.Context) error {
		if !strings.Contains(string(p.output()), "ready") {
			return errors.New("not yet")
		}
		return nil
	}
}

// A program that ends instead of getting ready is an error at once, and the error shows what it said.
func TestAwaitEnds(t *testing.T) {
	p := child(t, "fails")
	err := p.await(t.Context(), saysReady(p))
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "no such flag") {
		t.Errorf("got %v, want its exit status and its output", err)
	}
}

func TestStop(t *testing.T) {
	p := child(t, "waits")
	if err := p.await(t.Context(), saysReady(p)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to stop
		if err := p.stop(syscall.SIGTERM, time.Minute); err != nil {
			t.Error(err)
		}
	}
	select {
	case <-p.done:
		if p.err != nil {
			t.Errorf("it ended with %v", p.err)
		}
	default:
		t.Error("it has not ended")
	}
}

// What does not listen is killed, and that is an error.
func TestStopKills(t *testing.T) {
	p := child(t, "deaf")
	if err := p.await(t.Context(), saysReady(p)); err != nil {
		t.Fatal(err)
	}
	if err := p.stop(syscall.SIGTERM, 0); err == nil || !strings.Contains(err.Error(), "was killed") {
		t.Errorf("got %v, want that it was killed", err)
	}
	<-p.done
}

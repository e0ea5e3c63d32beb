package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// maxRetries is how often disputed tests are run again.
const maxRetries = 2

// exclusive is held while a unit runs that is Exclusive.
var exclusive sync.Mutex

// unitRun runs one unit that is built on the engines of its suite: all attempts, and their
// evaluation. One goroutine may use it.
type unitRun struct {
	env   *Env
	suite *Suite
	unit  Unit
	only  []string // the top-level tests to run; nil: all

	attempts int
	retried  map[string]bool // the top-level tests that were run again
	engines  map[Engine]*engineRun
}

// engineRun is the part of a unitRun on one engine.
type engineRun struct {
	first    Verdicts      // of the first attempt
	verdicts Verdicts      // of all attempts, merged
	servers  int           // that the first attempt started
	took     time.Duration // by all attempts
}

// runUnit runs a unit that is built on the engines of its suite. An error says that there is no
// outcome.
func runUnit(ctx context.Context, env *Env, suite *Suite, unit Unit, o options) (_ outcome, problems []string, err error) {
	if unit.Clean != nil && !o.keep {
		defer unit.Clean()
	}
	u := &unitRun{env: env, suite: suite, unit: unit, only: o.tests, retried: map[string]bool{}, engines: map[Engine]*engineRun{}}
	if o.quick {
		u.only = unit.Quick
	}
	if o.tests != nil {
		u.unit.StartsServers = false // other tests of the unit may start servers
	}
	for _, e := range suite.engines() {
		u.engines[e] = &engineRun{verdicts: Verdicts{}}
	}
	if err := u.attempt(ctx, u.only); err != nil {
		return outcome{}, nil, err
	}
	for range maxRetries {
		again := disputed(u.verdicts())
		if len(again) == 0 {
			break
		}
		fmt.Printf("%s %s: retrying: %s\n", suite.Name, unit.Name, strings.Join(again, " "))
		for _, test := range again {
			u.retried[test] = true
		}
		if err := u.attempt(ctx, again); err != nil {
			return outcome{}, nil, err
		}
	}
	result, problems := u.outcome()
	return result, problems, nil
}

// attempt runs the named top-level tests, or all, on each engine.
func (u *unitRun) attempt(ctx context.Context, only []string) error {
	if u.unit.Exclusive {
		exclusive.Lock()
		defer exclusive.Unlock()
	}
	// Most tests wait most of the time, so the engines run at the same time; in retries one after
	// the other.
	oneAfterOther := u.unit.Exclusive || u.attempts > 0
	engines := u.suite.engines()
	errs := make([]error, len(engines))
	var running sync.WaitGroup
	for i, e := range engines {
		running.Go(func() { errs[i] = u.attemptOn(ctx, e, only) })
		if oneAfterOther {
			running.Wait()
		}
	}
	running.Wait()
	u.attempts++
	return errors.Join(errs...)
}

// attemptOn runs tests on one engine and merges their verdicts. It may run for several engines at
// once.
func (u *unitRun) attemptOn(ctx context.Context, engine Engine, only []string) error {
	name := fmt.Sprintf("%s_%s_%s_%d.log", u.suite.Name, strings.ReplaceAll(u.unit.Name, "/", "_"), engine, u.attempts)
	log := filepath.Join(u.env.Bin, "logs", name)
	started := time.Now()
	verdicts, err := u.unit.Run(ctx, engine, only, log)
	if err != nil {
		return fmt.Errorf("engine %s: %w", engine, err)
	}
	took := time.Since(started)
	c := count(verdicts)
	fmt.Printf("%s %s: %s: %d passed, %d failed, %d skipped in %.0f s (%s)\n",
		u.suite.Name, u.unit.Name, engine, c.Passed, c.Failed, c.Skipped, took.Seconds(), log)
	run := u.engines[engine]
	if u.attempts == 0 {
		run.first, run.servers = verdicts, startedServers(log, engine)
	}
	run.verdicts.merge(verdicts)
	run.took += took
	return nil
}

// verdicts returns the verdicts of all attempts, by engine.
func (u *unitRun) verdicts() map[Engine]Verdicts {
	byEngine := map[Engine]Verdicts{}
	for e, run := range u.engines {
		byEngine[e] = run.verdicts
	}
	return byEngine
}

// outcome returns the row of the document, and a line for each problem.
func (u *unitRun) outcome() (outcome, []string) {
	verdicts := u.verdicts()
	result := outcome{
		Source: u.unit.Source, Date: today(), Exclusive: u.unit.Exclusive, Engines: map[Engine]counts{}, Unstable: map[Engine][]string{},
		Failed: failedEverywhere(verdicts), Differences: differences(verdicts),
	}
	found := slices.Clone(result.Differences)
	for _, test := range result.Failed {
		found = append(found, failure(test))
	}
	expected := slices.DeleteFunc(slices.Clone(known), func(k knownFinding) bool { return u.only != nil && !slices.Contains(u.only, top(k.Test)) })
	problems := judge(expected, u.suite.Name, u.unit.Name, found)
	for _, e := range u.suite.engines() {
		run := u.engines[e]
		c := count(run.verdicts)
		c.Servers, c.Retried, c.Seconds = run.servers, len(u.retried), int(run.took.Round(time.Second).Seconds())
		result.Engines[e] = c
		problems = append(problems, judgeActivity(idle, u.suite.Name, u.unit, e, c)...)
		for test, verdict := range run.first {
			if (verdict == Fail || verdict == Absent) && run.verdicts[test] == Pass && test == top(test) {
				result.Unstable[e] = append(result.Unstable[e], test)
			}
		}
		slices.Sort(result.Unstable[e])
	}
	return result, problems
}

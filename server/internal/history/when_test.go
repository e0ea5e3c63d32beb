package history

import (
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/stratakube/strata/kube/revisiontimes"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func observed() *revisiontimes.RevisionTimes {
	return &revisiontimes.RevisionTimes{Now: noon.Add(100 * time.Second), Oldest: 20, Latest: 70, WatchFrom: 15, Times: []revisiontimes.RevisionTime{
		{Revision: 30, Time: noon}, {Revision: 50, Time: noon.Add(20 * time.Second)}, {Revision: 60, Time: noon.Add(90 * time.Second)}}}
}

func TestMoment_Flags_AreParsed(t *testing.T) {
	for args, want := range map[string]struct {
		revision int64
		err      string
	}{
		"":                               {70, ""},
		"--at=30s":                       {50, ""},
		"--at=2026-01-01T12:00:05Z":      {30, ""},
		"--at=2026-01-01T13:00:20+01:00": {50, ""},
		"--at-revision=25":               {25, ""},
		"--at=-5m":                       {0, "in the future: give a duration ago"},
		"--at=yesterday":                 {0, "neither a duration ago"},
		"--at=2h":                        {0, "read pods at 2h: the server has observed times since 2026-01-01T12:00:00Z (revision 30); older revisions can be read by number, down to 20 (--at-revision=20)"},
		"--at=2026-01-01T14:00:00Z":      {0, "in the future"},
		"--at-revision=19":               {0, "read pods: revision 19 is older than the server's history: the oldest revision is 20"},
		"--at-revision=71":               {0, "the newest one is 70"},
		"--at-revision=0":                {0, "is no revision"},
		"--at-revision=1x":               {0, "is no revision"},
	} {
		var m moment
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		momentFlags(flags, &m, "at", "read")
		err := flags.Parse(strings.Fields(args))
		var got int64
		if err == nil {
			got, err = m.in("pods", observed(), observed().Latest)
		}
		if got != want.revision || (err == nil) != (want.err == "") || err != nil && !strings.Contains(err.Error(), want.err) {
			t.Errorf("%q: %d, %v; want %d, %q", args, got, err, want.revision, want.err)
		}
	}
}

func TestMoment_Fixed_IsTheSameForAllResources(t *testing.T) {
	m := moment{ago: 80 * time.Second, text: "80s"}
	m.fix(noon.Add(100 * time.Second))
	later := observed()
	later.Now = later.Now.Add(time.Hour)
	if got, err := m.in("pods", later, 0); err != nil || got != 50 {
		t.Errorf("%d, %v; want 50", got, err)
	}
}

func TestMoment_LongDuration_BeginsAtTheOldestRevision(t *testing.T) {
	for args, want := range map[string]struct {
		revision int64
		capped   bool
		err      string
	}{
		"":                             {25, false, ""},
		"--since=30s":                  {50, false, ""},
		"--since=2h":                   {25, true, ""}, // before the first observed time
		"--since-revision=40":          {40, false, ""},
		"--since=2026-01-01T12:00:05Z": {30, false, ""},
		"--since=2026-01-01T10:00:00Z": {0, false, "read pods at 2026-01-01T10:00:00Z: the server has observed times since"},
		"--since-revision=19":          {0, false, "older than the server's history"},
	} {
		var m moment
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		momentFlags(flags, &m, "since", "begin")
		if err := flags.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		m.fix(observed().Now)
		got, capped, err := m.begin("pods", observed(), 25)
		if got != want.revision || capped != want.capped || (err == nil) != (want.err == "") || err != nil && !strings.Contains(err.Error(), want.err) {
			t.Errorf("%q: %d, %v, %v; want %d, %v, %q", args, got, capped, err, want.revision, want.capped, want.err)
		}
	}
	// revision 50, which another resource of the window cannot read
	m := moment{ago: 80 * time.Second, text: "80s"}
	if got, capped, err := m.begin("pods", observed(), 55); got != 55 || !capped || err != nil {
		t.Errorf("before the oldest common revision: %d, %v, %v; want 55", got, capped, err)
	}
	if got, capped, err := m.begin("pods", &revisiontimes.RevisionTimes{Now: noon, Oldest: 7, Latest: 9}, 7); got != 7 || !capped || err != nil {
		t.Errorf("without times: %d, %v, %v; want 7", got, capped, err)
	}
}

func TestStamp_Revisions_HaveTheirTime(t *testing.T) {
	for revision, want := range map[int64]string{
		20: "<unknown>", 29: "<unknown>", 30: "2026-01-01T12:00:00Z", 31: "2026-01-01T12:00:20Z", 60: "2026-01-01T12:01:30Z",
		70: "2026-01-01T12:01:40Z", // not recorded yet: now
	} {
		if got := stampOf(observed(), revision).when(); got != want {
			t.Errorf("revision %d: %s, want %s", revision, got, want)
		}
	}
}

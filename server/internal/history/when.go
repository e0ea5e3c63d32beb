package history

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"

	"github.com/stratakube/strata/kube/revisiontimes"
)

// moment is a point of the past: a duration before the server's time, a time, or a revision. It is
// the value of a flag.
type moment struct {
	ago      time.Duration
	time     time.Time
	revision int64
	text     string // "" if it is not set
	flag     string // its name
}

func (m *moment) String() string { return m.text }
func (m *moment) Type() string   { return "duration|time" }

// Set parses a duration or a time.
func (m *moment) Set(text string) error {
	if ago, err := time.ParseDuration(text); err == nil {
		if ago < 0 {
			return fmt.Errorf("%s is in the future: give a duration ago, such as 5m", text)
		}
		*m = moment{ago: ago, text: text, flag: m.flag}
		return nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return fmt.Errorf("%q is neither a duration ago, such as 5m or 1h30m, nor a time, such as 2026-01-02T15:04:05Z", text)
	}
	*m = moment{time: at, text: text, flag: m.flag}
	return nil
}

// revisionFlag is the flag of a moment's revision.
type revisionFlag struct{ *moment }

func (f revisionFlag) Type() string { return "revision" }

func (f revisionFlag) String() string { return "" }

func (f revisionFlag) Set(text string) error {
	var revision int64
	if _, err := fmt.Sscanf(text, "%d", &revision); err != nil || revision <= 0 || fmt.Sprint(revision) != text {
		return fmt.Errorf("%q is no revision: give the resource version of an object or a list", text)
	}
	*f.moment = moment{revision: revision, text: "revision " + text, flag: f.flag}
	return nil
}

// momentFlags adds the flags name and name-revision, of which a user may set one.
func momentFlags(flags *pflag.FlagSet, m *moment, name, usage string) {
	m.flag = name
	flags.Var(m, name, usage+": a duration ago, or a time (RFC 3339)")
	flags.Var(revisionFlag{m}, name+"-revision", usage+": a revision")
}

// at returns the moment as a time of the server, if it is one.
func (m *moment) at(now time.Time) (time.Time, bool) {
	switch {
	case m.text == "" || m.revision != 0:
		return time.Time{}, false
	case !m.time.IsZero():
		return m.time, true
	}
	return now.Add(-m.ago), true
}

// fix replaces a duration by the time that it means, so that it means the same for all resources.
func (m *moment) fix(now time.Time) {
	if t, ok := m.at(now); ok {
		m.time = t
	}
}

// in returns the moment's revision in a resource's history. An unset moment is the revision unset.
func (m *moment) in(resource string, times *revisiontimes.RevisionTimes, unset int64) (int64, error) {
	if m.text == "" {
		return unset, nil
	}
	revision, err := m.revision, error(nil)
	if t, ok := m.at(times.Now); ok {
		revision, err = times.At(t)
		if err != nil && len(times.Times) > 0 && t.Before(times.Times[0].Time) {
			err = fmt.Errorf("%w (--%s-revision=%d)", err, m.flag, times.Oldest)
		}
	} else {
		err = times.Check(revision)
	}
	switch {
	case err != nil && m.revision != 0: // which the error names
		return 0, fmt.Errorf("read %s: %w", resource, err)
	case err != nil:
		return 0, fmt.Errorf("read %s at %s: %w", resource, m.text, err)
	}
	return revision, nil
}

// begin returns the revision at which a window begins: oldest, the oldest readable one, if the
// moment is not set. A duration that reaches further back begins there too, and capped reports it:
// "the last hour" of a server that was started a minute ago is a minute.
func (m *moment) begin(resource string, times *revisiontimes.RevisionTimes, oldest int64) (revision int64, capped bool, err error) {
	if t, ok := m.at(times.Now); ok && m.ago > 0 && !t.After(times.Now) {
		if revision, err := times.At(t); err == nil && revision >= oldest {
			return revision, false, nil
		}
		return oldest, true, nil
	}
	revision, err = m.in(resource, times, oldest)
	return revision, false, err
}

// noteCapped prints that a window begins at its oldest readable revision, later than the user's
// duration.
func (m *moment) noteCapped(out io.Writer, resource string, oldest stamp) {
	fmt.Fprintf(out, "--%s %s reaches further back than the readable revisions of %s, which begin with %s: the window begins there\n", m.flag, m.text, resource, oldest)
}

// stamp is a revision with the time at which it was written, which is nil if the server does not
// know it.
type stamp struct {
	Revision int64      `json:"revision,string"`
	Time     *time.Time `json:"time,omitempty"`
}

func stampOf(times *revisiontimes.RevisionTimes, revision int64) stamp {
	t, ok := times.TimeOf(revision)
	if !ok {
		if len(times.Times) == 0 || revision < times.Times[0].Revision {
			return stamp{Revision: revision}
		}
		// newer than the last time that the server has recorded, which is a second ago
		t = times.Now
	}
	t = t.UTC().Truncate(time.Second)
	return stamp{revision, &t}
}

// when is the time of a stamp for a table.
func (s stamp) when() string {
	if s.Time == nil {
		return "<unknown>"
	}
	return s.Time.Format(time.RFC3339)
}

func (s stamp) String() string {
	if s.Time == nil {
		return fmt.Sprintf("revision %d", s.Revision)
	}
	return fmt.Sprintf("revision %d (%s)", s.Revision, s.when())
}

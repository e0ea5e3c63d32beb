// Package revisiontimes is the form of a list that says which of its revisions a server can read,
// and when they were current. A client requests it from the path of a list, with the Accept header
// MediaType, and needs the rights of the list. A server without it answers 406 Not Acceptable.
package revisiontimes

import (
	"fmt"
	"mime"
	"net/http"
	"slices"
	"sort"
	"strings"
	"time"
)

// MediaType is the Accept header that requests RevisionTimes.
const MediaType = "application/json;as=RevisionTimes;v=v1alpha1;g=stratakube.io"

// Kind and APIVersion are those of RevisionTimes.
const (
	Kind       = "RevisionTimes"
	APIVersion = "stratakube.io/v1alpha1"
)

// RevisionTimes are the revisions of a resource in a server's memory. All revisions between Oldest
// and Latest can be listed.
type RevisionTimes struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	// Now is the server's time.
	Now time.Time `json:"now"`
	// Oldest and Latest are the oldest revision at which the resource can be listed, and the
	// newest.
	Oldest int64 `json:"oldest,string"`
	Latest int64 `json:"latest,string"`
	// WatchFrom is the oldest revision from which the resource can be watched, at most Oldest.
	WatchFrom int64 `json:"watchFrom,string"`
	// Times are revisions with the time at which each became the newest, both ascending (times may
	// be equal, if the clock was set back). The last is the newest revision of the cluster. A
	// revision that is left out was written less than a second after one that is not. They begin at
	// the start of the server or the beginning of its window: for older revisions, which it has
	// read from etcd's history, no time is known.
	Times []RevisionTime `json:"times"`
}

// RevisionTime is a revision and the time at which it became the newest one.
type RevisionTime struct {
	Revision int64     `json:"revision,string"`
	Time     time.Time `json:"time"`
}

// Requested reports whether a request for a list accepts RevisionTimes in the first place.
func Requested(req *http.Request) bool {
	accept, _, _ := strings.Cut(req.Header.Get("Accept"), ",")
	if !strings.Contains(accept, Kind) {
		return false
	}
	media, params, err := mime.ParseMediaType(accept)
	return err == nil && media == "application/json" && params["as"] == Kind && params["g"]+"/"+params["v"] == APIVersion
}

// At returns the revision that was the newest at a time. Errors name the readable revisions.
func (r *RevisionTimes) At(t time.Time) (int64, error) {
	i := sort.Search(len(r.Times), func(i int) bool { return r.Times[i].Time.After(t) }) - 1
	switch {
	case t.After(r.Now):
		return 0, fmt.Errorf("%s is in the future of the server, where it is %s", format(t), format(r.Now))
	case len(r.Times) == 0:
		return 0, fmt.Errorf("the server has not observed any revision yet")
	case i < 0:
		return 0, fmt.Errorf("the server has observed times since %s (revision %d); older revisions can be read by number, down to %d", format(r.Times[0].Time), r.Times[0].Revision, r.Oldest)
	}
	revision := min(r.Times[i].Revision, r.Latest)
	if revision < r.Oldest {
		return 0, fmt.Errorf("the revision of %s, %d, is older than the server's history: %s", format(t), revision, r.oldest())
	}
	return revision, nil
}

// Check returns an error, which names the readable revisions, unless the resource can be listed at
// the revision.
func (r *RevisionTimes) Check(revision int64) error {
	switch {
	case revision < r.Oldest:
		return fmt.Errorf("revision %d is older than the server's history: %s", revision, r.oldest())
	case revision > r.Latest:
		return fmt.Errorf("revision %d is in the future: the newest one is %d", revision, r.Latest)
	}
	return nil
}

// oldest describes the oldest revision.
func (r *RevisionTimes) oldest() string {
	if t, ok := r.TimeOf(r.Oldest); ok {
		return fmt.Sprintf("the oldest revision is %d, of %s", r.Oldest, format(t))
	}
	return fmt.Sprintf("the oldest revision is %d, from before the server's start", r.Oldest)
}

// TimeOf returns when the server had the revision, at most a second too late. It reports false for
// revisions before the first observed one, and for future ones.
func (r *RevisionTimes) TimeOf(revision int64) (time.Time, bool) {
	i, _ := slices.BinarySearchFunc(r.Times, revision, func(x RevisionTime, revision int64) int {
		return int(min(max(x.Revision-revision, -1), 1))
	})
	if i == len(r.Times) || i == 0 && revision < r.Times[0].Revision {
		return time.Time{}, false
	}
	return r.Times[i].Time, true
}

func format(t time.Time) string { return t.Format(time.RFC3339) }

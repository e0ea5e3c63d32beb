// Package watchprogress is the form of a list that requests bookmarks now: the server answers with a revision that includes every
// acknowledged write, and the watches of the requesting user report that revision as soon as they have delivered all events up to
// there. So a cache that is fed by a watch can be read consistently: request, wait until the cache has reached the revision, read. Cache
// and Reader do that for caches of client-go.
//
// A client requests it from the path of a list, with the Accept header MediaType, and needs the rights of the list. A server without
// it, or with the gate BookmarkOnRequest off, answers 406 Not Acceptable.
package watchprogress

import (
	"mime"
	"net/http"
	"strings"
)

// MediaType is the Accept header that requests WatchProgress.
const MediaType = "application/json;as=WatchProgress;v=v1alpha1;g=strata"

// Kind and APIVersion are those of WatchProgress.
const (
	Kind       = "WatchProgress"
	APIVersion = "strata/v1alpha1"
)

// WatchProgress is the answer to a request for bookmarks.
type WatchProgress struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	// ResourceVersion is the revision that each watch reports, with a bookmark at that revision or later, or has reported before. A
	// state of the collection at or after it has every write that was acknowledged before the request.
	ResourceVersion int64 `json:"resourceVersion,string"`
	// Watches is the number of open watches that report it: those of the requesting user below the path that allow bookmarks, on the
	// server that answered. 0 if the watch of the client is on another server, or has ended.
	Watches int `json:"watches"`
}

// Requested reports whether a request for a list accepts WatchProgress in the first place.
func Requested(req *http.Request) bool {
	accept, _, _ := strings.Cut(req.Header.Get("Accept"), ",")
	if !strings.Contains(accept, Kind) {
		return false
	}
	media, params, err := mime.ParseMediaType(accept)
	return err == nil && media == "application/json" && params["as"] == Kind && params["g"]+"/"+params["v"] == APIVersion
}

package readpath

import (
	"encoding/json"
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	storeerr "k8s.io/apiserver/pkg/storage/errors"

	"github.com/stratakube/strata/kube/watchprogress"
)

// requestsProgress reports whether the request is a LIST in the form WatchProgress that can be answered. Otherwise it is passed on, and
// upstream refuses the form (406).
func (r *readRequest) requestsProgress() bool {
	return r.info.Verb == "list" && watchprogress.Requested(r.req) && r.resource.Store.BookmarksOnRequest()
}

// watchProgress answers a LIST in the form WatchProgress.
func (r *readRequest) watchProgress() {
	r.instrument(func() {
		data, err := r.requestBookmarks()
		if err != nil {
			r.fail(storeerr.InterpretListError(err, r.groupResource()))
			return
		}
		r.w.Header().Set("Content-Type", string(mediaJSON))
		r.w.WriteHeader(http.StatusOK)
		r.w.Write(append(data, '\n')) // an error is that of the client
	})
}

// requestBookmarks requests bookmarks for the watches of the request's user and path, and returns the response.
func (r *readRequest) requestBookmarks() ([]byte, error) {
	opts, err := r.listOptions()
	if err != nil {
		return nil, err
	}
	key, o, err := r.storageOptions(opts)
	if err != nil {
		return nil, err
	}
	var name string
	if user, ok := request.UserFrom(r.req.Context()); ok {
		name = user.GetName()
	}
	rev, watches, err := r.resource.Store.RequestBookmarks(r.req.Context(), name, key, o.Recursive)
	if err != nil {
		return nil, err
	}
	return json.Marshal(watchprogress.WatchProgress{Kind: watchprogress.Kind, APIVersion: watchprogress.APIVersion,
		ResourceVersion: rev, Watches: watches})
}

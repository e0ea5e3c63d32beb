package readpath

import (
	"encoding/json"
	"net/http"
	"time"

	storeerr "k8s.io/apiserver/pkg/storage/errors"

	"github.com/stratakube/strata/kube/revisiontimes"
)

// revisionTimes answers a LIST in the form RevisionTimes.
func (r *readRequest) revisionTimes() {
	r.instrument(func() {
		h, err := r.resource.Store.History()
		if err != nil {
			r.fail(storeerr.InterpretListError(err, r.groupResource()))
			return
		}
		answer := revisiontimes.RevisionTimes{Kind: revisiontimes.Kind, APIVersion: revisiontimes.APIVersion, Now: time.Now(),
			Oldest: h.Oldest, Latest: h.Latest, WatchFrom: h.WatchFrom, Times: make([]revisiontimes.RevisionTime, len(h.Times))}
		for i, t := range h.Times {
			answer.Times[i] = revisiontimes.RevisionTime{Revision: t.Revision, Time: t.Time}
		}
		data, err := json.Marshal(answer)
		if err != nil {
			r.fail(err)
			return
		}
		r.w.Header().Set("Content-Type", string(mediaJSON))
		r.w.WriteHeader(http.StatusOK)
		r.w.Write(append(data, '\n')) // an error is that of the client
	})
}

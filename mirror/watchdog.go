package mirror

import "errors"

// ErrFeedSilent is the cause with which the mirror ends a Watch that tells it nothing though
// etcd has moved on: its member hangs, or is cut off. A source may begin the next one
// elsewhere.
var ErrFeedSilent = errors.New("feed is silent")

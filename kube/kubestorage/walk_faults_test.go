package kubestorage

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// wrongLists is a storage with faulty lists.
type wrongLists struct {
	storage.Interface
	fault listFault
}

func (s wrongLists) GetList(ctx context.Context, key string, opts storage.ListOptions, obj runtime.Object) error {
	return s.fault(s.Interface, ctx, key, opts, obj.(*example.PodList))
}

// listFault answers a list from s, with a fault.
type listFault func(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error

// listFaults are faults of lists that a walk must detect.
var listFaults = map[string]listFault{
	"a page at the latest revision":  pageAtLatest,
	"a key is dropped":               dropKey,
	"the last of a page is repeated": repeatLastItem,
	"no token at the end of a page":  dropToken,
	"a count that is wrong by one":   miscount,
	"one item more than the limit":   exceedLimit,
	"an exact revision is the next":  nextRevision,
}

// pageAtLatest answers a continued list at the latest revision, with the revision of the token.
func pageAtLatest(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	token := opts.Predicate.Continue
	if token == "" {
		return s.GetList(ctx, key, opts, list)
	}
	if err := s.GetList(ctx, key, opts, list); err != nil {
		return err
	}
	// The page of the present, with the token's revision.
	rev := list.ResourceVersion
	from, _, err := storage.DecodeContinue(token, "/")
	if err != nil {
		return err
	}
	opts.Predicate.Continue, err = storage.EncodeContinue(from, "/", -1)
	if err != nil {
		return err
	}
	if err := s.GetList(ctx, key, opts, list); err != nil {
		return err
	}
	list.ResourceVersion = rev
	if list.Continue != "" {
		from, _, err := storage.DecodeContinue(list.Continue, "/")
		if err != nil {
			return err
		}
		at, err := strconv.ParseInt(rev, 10, 64)
		if err != nil {
			return err
		}
		list.Continue, err = storage.EncodeContinue(from, "/", at)
		return err
	}
	return nil
}

// dropKey removes the first item of a continued page.
func dropKey(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	err := s.GetList(ctx, key, opts, list)
	if opts.Predicate.Continue != "" && len(list.Items) > 1 {
		list.Items = slices.Delete(list.Items, 0, 1)
	}
	return err
}

// repeatLastItem replaces the last item of a page by a copy of the item before.
func repeatLastItem(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	err := s.GetList(ctx, key, opts, list)
	if n := len(list.Items); list.Continue != "" && n > 1 {
		list.Items = list.Items[:n-1]
		list.Items = append(list.Items, list.Items[n-2])
	}
	return err
}

// dropToken ends each list after its first page.
func dropToken(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	err := s.GetList(ctx, key, opts, list)
	list.Continue, list.RemainingItemCount = "", nil
	return err
}

// miscount adds one to the number of remaining items.
func miscount(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	err := s.GetList(ctx, key, opts, list)
	if list.RemainingItemCount != nil {
		*list.RemainingItemCount++
	}
	return err
}

// exceedLimit returns one item more than the limit.
func exceedLimit(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	if opts.Predicate.Limit > 0 {
		opts.Predicate.Limit++
	}
	return s.GetList(ctx, key, opts, list)
}

// nextRevision answers an exact read from the revision after, if there is one.
func nextRevision(s storage.Interface, ctx context.Context, key string, opts storage.ListOptions, list *example.PodList) error {
	if opts.ResourceVersionMatch != metav1.ResourceVersionMatchExact {
		return s.GetList(ctx, key, opts, list)
	}
	rev, err := strconv.ParseInt(opts.ResourceVersion, 10, 64)
	if err != nil {
		return err
	}
	asked := opts.ResourceVersion
	opts.ResourceVersion = fmt.Sprint(rev + 1)
	if err := s.GetList(ctx, key, opts, list); err != nil {
		opts.ResourceVersion = asked
		return s.GetList(ctx, key, opts, list)
	}
	list.ResourceVersion = asked
	return nil
}

// TestWalk_FaultyStorage_IsDetected runs the same world on storages with a fault, and a walk must
// detect each.
func TestWalk_FaultyStorage_IsDetected(t *testing.T) {
	t.Parallel()
	for name, fault := range listFaults {
		t.Run(name, func(t *testing.T) {
			_, err := walk(t, 60, func(s storage.Interface) storage.Interface { return wrongLists{s, fault} })
			if err == nil {
				t.Fatal("it was not found")
			}
			if text := err.Error(); len(text) > 300 {
				t.Log(text[:300], "...")
			} else {
				t.Log(text)
			}
		})
	}
}

package mirror_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// List a resource, then follow it: the cursor of a snapshot delivers every later event once, in
// revision order. The store takes the place of an etcd here; etcdsource.New returns the source that
// reads one.
func Example() {
	store := memory.New()
	store.Put("/registry/pods/a", "created")
	m, err := mirror.New(mirror.Options{
		Source: store,
		Prefix: "/registry/",
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	pods, err := m.Claim("/registry/pods/") // the part of the prefix that is read together
	if err != nil {
		log.Fatal(err)
	}
	if err := pods.WaitReady(context.Background()); err != nil {
		log.Fatal(err)
	}

	snapshot, err := pods.Latest()
	if err != nil {
		log.Fatal(err)
	}
	for entry := range snapshot.All("/registry/pods/", "") {
		fmt.Printf("listed %s %s\n", entry.Key(), entry.Value())
	}
	cursor := snapshot.Cursor("/registry/pods/", "")

	store.Put("/registry/pods/a", "changed")
	store.Delete("/registry/pods/a")
	for followed := 0; followed < 2; {
		changed := cursor.Changed() // before Next, so that no event is missed
		events, err := cursor.Next(nil, 100)
		if err != nil {
			log.Fatal(err) // ErrCompacted: the cursor is behind the retained history; list again
		}
		for _, event := range events {
			if event.Entry == nil {
				fmt.Printf("deleted %s\n", event.Key())
			} else {
				fmt.Printf("put %s %s\n", event.Key(), event.Entry.Value())
			}
		}
		if followed += len(events); len(events) == 0 {
			<-changed
		}
	}
	// Output:
	// listed /registry/pods/a created
	// put /registry/pods/a changed
	// deleted /registry/pods/a
}

// newExample mirrors the store and returns when the pods can be read; Example shows these steps.
func newExample(store *memory.Store) (*mirror.Mirror, *mirror.Resource) {
	m, err := mirror.New(mirror.Options{Source: store, Prefix: "/registry/", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	pods, err := m.Claim("/registry/pods/")
	if err != nil {
		log.Fatal(err)
	}
	if err := pods.WaitReady(context.Background()); err != nil {
		log.Fatal(err)
	}
	return m, pods
}

// Read the state at an old revision, as long as history is retained.
func ExampleResource_At() {
	store := memory.New()
	m, pods := newExample(store)
	defer m.Close()
	created := store.Put("/registry/pods/a", "created")
	deleted := store.Delete("/registry/pods/a")
	if err := m.Wait(context.Background(), deleted); err != nil {
		log.Fatal(err)
	}

	before, err := pods.At(created)
	if err != nil {
		log.Fatal(err) // ErrCompacted: the revision is older than the retained history
	}
	entry, _ := before.Get("/registry/pods/a")
	fmt.Printf("%s\n", entry.Value())
	now, err := pods.Latest()
	if err != nil {
		log.Fatal(err)
	}
	_, found := now.Get("/registry/pods/a")
	fmt.Println(found)
	// Output:
	// created
	// false
}

// Read a write of one's own: wait until the mirror has published its revision.
func ExampleMirror_Wait() {
	store := memory.New()
	m, pods := newExample(store)
	defer m.Close()

	revision := store.Put("/registry/pods/a", "mine")
	if err := m.Wait(context.Background(), revision); err != nil {
		log.Fatal(err)
	}
	snapshot, err := pods.Latest()
	if err != nil {
		log.Fatal(err)
	}
	entry, _ := snapshot.Get("/registry/pods/a")
	fmt.Printf("%s %t\n", entry.Value(), entry.ModRevision() == revision)
	// Output: mine true
}

// Resume a watch at the last revision that its client has seen.
func ExampleResource_CursorAfter() {
	store := memory.New()
	m, pods := newExample(store)
	defer m.Close()
	seen := store.Put("/registry/pods/a", "seen")
	missed := store.Put("/registry/pods/b", "missed")
	if err := m.Wait(context.Background(), missed); err != nil {
		log.Fatal(err)
	}

	cursor, err := pods.CursorAfter(seen, "/registry/pods/", "")
	if err != nil {
		log.Fatal(err)
	}
	defer cursor.Unfollow()
	events, err := cursor.Next(nil, 100)
	if err != nil {
		log.Fatal(err) // ErrCompacted: list again
	}
	for _, event := range events {
		fmt.Printf("%s %s\n", event.Key(), event.Entry.Value())
	}
	// Output: /registry/pods/b missed
}

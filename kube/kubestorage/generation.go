package kubestorage

// dropReplaced drops derived data of retired keys, concurrently with readers, so that data
// decrypted with removed keys does not stay in memory until its entry is replaced. The view's mutex
// is held.
func dropReplaced(s *Store) {
	s.selections.KeysReplaced()
	s.goroutines.Start(func() {
		s.selections.DropEnded()
		for memos := range s.resource.Memos(s.ctx) {
			memos.DropClosed()
		}
	})
}

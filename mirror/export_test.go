package mirror

// Check runs the invariant check on the writer and returns its finding. It also
// is a barrier: commands given before it have been obeyed.
func (m *Mirror) Check() error {
	done := make(chan error, 1)
	m.do(func() { done <- m.check() })
	select {
	case err := <-done:
		return err
	case <-m.ctx.Done():
		return ErrClosed
	}
}

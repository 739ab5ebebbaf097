package admin

// RunsReplays reports whether Run is running.
func (o Operator) RunsReplays() bool {
	o.replays.mu.Lock()
	defer o.replays.mu.Unlock()
	return o.replays.running
}

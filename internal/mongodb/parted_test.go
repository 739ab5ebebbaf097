package mongodb

import "testing"

// N3: transactions become smaller at once, and larger again only after some have ended in time.
func TestPartSizeFollowsTheServer(t *testing.T) {
	t.Parallel()
	s := NewPartSize(MaxDocuments)
	s.Ended()
	if s.Most() != MaxDocuments {
		t.Errorf("after a transaction in time: got %d, want %d", s.Most(), MaxDocuments)
	}

	// This transaction had fewer documents than allowed, because of its bytes.
	s.Slow(300)
	if s.Most() != 75 {
		t.Errorf("after a slow transaction of 300: got %d, want 75", s.Most())
	}
	for range growAfter - 1 {
		s.Ended()
	}
	if s.Most() != 75 {
		t.Errorf("after %d transactions in time: got %d, want 75", growAfter-1, s.Most())
	}
	s.Ended()
	if s.Most() != 150 {
		t.Errorf("after %d transactions in time: got %d, want 150", growAfter, s.Most())
	}

	s.Slow(2)
	if s.Most() != 1 {
		t.Errorf("after a slow transaction of 2: got %d, want 1", s.Most())
	}
	for range 20 * growAfter {
		s.Ended()
	}
	if s.Most() != MaxDocuments {
		t.Errorf("after many transactions in time: got %d, want %d", s.Most(), MaxDocuments)
	}
}

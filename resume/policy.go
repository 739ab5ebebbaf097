package resume

import "fmt"

// LostHistory is the policy for a lost history: the server no longer has the changes since the
// checkpoint, so the stream cannot deliver them.
type LostHistory string

// Policies for a lost history.
const (
	// SweepLostHistory reads the missing events from the collections, delivers them and continues.
	// No event is lost. Events that may have been delivered before are marked as redelivered. It is
	// the default.
	SweepLostHistory LostHistory = "sweep"

	// HaltLostHistory stops and waits for an operator.
	HaltLostHistory LostHistory = "halt"
)

// ParseLostHistory parses "sweep" or "halt". The empty text is SweepLostHistory. Other texts are an
// error.
func ParseLostHistory(s string) (LostHistory, error) {
	p := LostHistory(s)
	switch p {
	case "":
		return SweepLostHistory, nil
	case SweepLostHistory, HaltLostHistory:
		return p, nil
	}
	return "", fmt.Errorf("lost history: %q is neither %s nor %s", s, SweepLostHistory, HaltLostHistory)
}

// UnmarshalText parses the policy in a configuration, as ParseLostHistory does.
func (p *LostHistory) UnmarshalText(text []byte) error {
	v, err := ParseLostHistory(string(text))
	if err != nil {
		return err
	}
	*p = v
	return nil
}

// Invalidate is the policy for a watched collection that is dropped or renamed, which ends its
// stream.
type Invalidate string

// Policies for a dropped or renamed collection.
const (
	// ResumeAfterInvalidate continues with the next collection of the same name. It is the default.
	ResumeAfterInvalidate Invalidate = "resume"

	// HaltOnInvalidate stops and waits for an operator.
	HaltOnInvalidate Invalidate = "halt"
)

// ParseInvalidate parses "resume" or "halt". The empty text is ResumeAfterInvalidate. Other texts
// are an error.
func ParseInvalidate(s string) (Invalidate, error) {
	p := Invalidate(s)
	switch p {
	case "":
		return ResumeAfterInvalidate, nil
	case ResumeAfterInvalidate, HaltOnInvalidate:
		return p, nil
	}
	return "", fmt.Errorf("invalidate: %q is neither %s nor %s", s, ResumeAfterInvalidate, HaltOnInvalidate)
}

// UnmarshalText parses the policy in a configuration, as ParseInvalidate does.
func (p *Invalidate) UnmarshalText(text []byte) error {
	v, err := ParseInvalidate(string(text))
	if err != nil {
		return err
	}
	*p = v
	return nil
}

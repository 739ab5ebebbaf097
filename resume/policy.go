package resume

import "fmt"

// LostHistory says what to do when the server no longer holds the history behind the checkpoint, so that the stream
// cannot bring what was appended since.
type LostHistory string

const (
	// SweepLostHistory finds what the stream missed by reading the collections themselves, publishes it, and goes on. It
	// is the default: nothing is lost, and what may have been delivered already is marked as redelivered.
	SweepLostHistory LostHistory = "sweep"
	// HaltLostHistory stops and waits for a person, for those who would rather decide by themselves each time.
	HaltLostHistory LostHistory = "halt"
)

// ParseLostHistory reads "sweep" or "halt"; "" is SweepLostHistory.
func ParseLostHistory(s string) (LostHistory, error) {
	switch p := LostHistory(s); p {
	case "":
		return SweepLostHistory, nil
	case SweepLostHistory, HaltLostHistory:
		return p, nil
	}
	return "", fmt.Errorf("lost history: %q is neither %s nor %s", s, SweepLostHistory, HaltLostHistory)
}

// UnmarshalText reads the policy from a configuration.
func (p *LostHistory) UnmarshalText(text []byte) error {
	v, err := ParseLostHistory(string(text))
	if err != nil {
		return err
	}
	*p = v
	return nil
}

// Invalidate says what to do when a watched collection is dropped or renamed, which ends its stream.
type Invalidate string

const (
	// ResumeAfterInvalidate goes on with the collection that is created under the name next. It is the default.
	ResumeAfterInvalidate Invalidate = "resume"
	// HaltOnInvalidate stops and waits for a person.
	HaltOnInvalidate Invalidate = "halt"
)

// ParseInvalidate reads "resume" or "halt"; "" is ResumeAfterInvalidate.
func ParseInvalidate(s string) (Invalidate, error) {
	switch p := Invalidate(s); p {
	case "":
		return ResumeAfterInvalidate, nil
	case ResumeAfterInvalidate, HaltOnInvalidate:
		return p, nil
	}
	return "", fmt.Errorf("invalidate: %q is neither %s nor %s", s, ResumeAfterInvalidate, HaltOnInvalidate)
}

// UnmarshalText reads the policy from a configuration.
func (p *Invalidate) UnmarshalText(text []byte) error {
	v, err := ParseInvalidate(string(text))
	if err != nil {
		return err
	}
	*p = v
	return nil
}

package inbox

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// What calls answer, to be asked for with errors.Is.
var (
	// ErrDuplicate says that the message was handled before; the error is a *DuplicateError.
	ErrDuplicate = errors.New("handled before")
	// ErrClaimed says that somebody else holds the claim; the error is a *ClaimedError.
	ErrClaimed = errors.New("claimed by another")
	// ErrClaimLost says that a claim is not held any more: its lease was over and another took it, or it was released.
	// The error is a *ClaimLostError.
	ErrClaimLost = errors.New("claim lost")
	// ErrBusy says that the same identity is being handled in this process at this moment; the error is a *BusyError.
	ErrBusy = errors.New("being handled in this process")
	// ErrRecreated says that a topic is not the one that the watermark was written for; the error is a *RecreatedError.
	ErrRecreated = errors.New("topic was created anew or lost records")
	// ErrUnconfirmed says that a topic looks like another one, and that Attach has to be called once more with the end
	// offset and leader epoch as they are now.
	ErrUnconfirmed = errors.New("read the partition's end again and attach again")
	// ErrStale says that another process has begun a new generation of the partition; the error is a *StaleError.
	ErrStale = errors.New("a newer generation of the partition has begun")
	// ErrInTransaction says that Claim got a context with a running transaction. A claim that the transaction's end would
	// undo protects from nothing.
	ErrInTransaction = errors.New("a claim must be committed before the handler's transaction begins: call Claim outside of it")
	// ErrInvalid says that an entry or an argument cannot be used as it is.
	ErrInvalid = errors.New("invalid entry")
)

// DuplicateError is ErrDuplicate with the identities that were handled before.
type DuplicateError struct {
	Keys []Key
	Err  error // the server's answer, if that is how it was found; else nil
}

func (e *DuplicateError) Error() string {
	const shown = 3
	texts := make([]string, 0, shown)
	for _, k := range e.Keys[:min(shown, len(e.Keys))] {
		texts = append(texts, k.String())
	}
	more := ""
	if n := len(e.Keys) - shown; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("%s: %s%s", ErrDuplicate, strings.Join(texts, ", "), more)
}

// Unwrap is ErrDuplicate and the server's answer.
func (e *DuplicateError) Unwrap() []error { return compact(ErrDuplicate, e.Err) }

// ClaimedError is ErrClaimed with the time, by the server's clock, at which the claim can be had if its holder does not
// renew it.
type ClaimedError struct {
	Key   Key
	Until time.Time
}

func (e *ClaimedError) Error() string {
	return fmt.Sprintf("%s: %s until %s", ErrClaimed, e.Key, e.Until.UTC().Format(time.RFC3339Nano))
}

// Unwrap is ErrClaimed.
func (e *ClaimedError) Unwrap() error { return ErrClaimed }

// ClaimLostError is ErrClaimLost with the identity, and with the error that kept the lease from being renewed, if any.
type ClaimLostError struct {
	Key Key
	Err error
}

func (e *ClaimLostError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s could not be renewed in time: %v", ErrClaimLost, e.Key, e.Err)
	}
	return fmt.Sprintf("%s: %s was taken by another or released", ErrClaimLost, e.Key)
}

// Unwrap is ErrClaimLost and the cause.
func (e *ClaimLostError) Unwrap() []error { return compact(ErrClaimLost, e.Err) }

// BusyError is ErrBusy with the identity.
type BusyError struct{ Key Key }

func (e *BusyError) Error() string { return fmt.Sprintf("%s: %s", ErrBusy, e.Key) }

// Unwrap is ErrBusy.
func (e *BusyError) Unwrap() error { return ErrBusy }

// RecreatedError is ErrRecreated with what was found.
type RecreatedError struct {
	Consumer, Topic string
	Partition       int32
	Watermark       int64 // one past the highest offset that was dealt with
	End             int64 // the partition's end offset now
	Epoch, Seen     int32 // the leader epoch now, and the highest that was seen; -1 is unknown
}

func (e *RecreatedError) Error() string {
	return fmt.Sprintf("%s: partition %d of %s ends at offset %d with leader epoch %d, but %s has handled up to offset %d at epoch %d; if the topic was deleted and created anew, call Renew or use WithRecreated(Resume)",
		ErrRecreated, e.Partition, e.Topic, e.End, e.Epoch, e.Consumer, e.Watermark, e.Seen)
}

// Unwrap is ErrRecreated.
func (e *RecreatedError) Unwrap() error { return ErrRecreated }

// StaleError is ErrStale: what this process fetched may be of a topic that is no more. Attach again.
type StaleError struct {
	Consumer, Topic   string
	Partition         int32
	Attached, Current int64 // generations
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("%s: %s is attached to generation %d of partition %d of %s, which is now at %d; drop what was fetched and attach again",
		ErrStale, e.Consumer, e.Attached, e.Partition, e.Topic, e.Current)
}

// Unwrap is ErrStale.
func (e *StaleError) Unwrap() error { return ErrStale }

// PrivilegeError says which action the server refused to this user, and on what.
type PrivilegeError struct {
	Action, On string
	Err        error
}

func (e *PrivilegeError) Error() string {
	return fmt.Sprintf("the user may not %s on %s: grant it, or let an administrator run the statements of Indexes: %v", e.Action, e.On, e.Err)
}

// Unwrap is the server's answer.
func (e *PrivilegeError) Unwrap() error { return e.Err }

func compact(errs ...error) []error {
	kept := errs[:0]
	for _, err := range errs {
		if err != nil {
			kept = append(kept, err)
		}
	}
	return kept
}

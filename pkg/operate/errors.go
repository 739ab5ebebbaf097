package operate

import (
	"errors"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// The kinds of errors. Test for them with errors.Is. The text of an error has the cause and the fix.
var (
	// ErrInvalid means that the request is wrong: a value that does not exist, an id of the wrong form, an empty time range, a
	// filter without a condition for an action.
	ErrInvalid = errors.New("the request is invalid")

	// ErrNotFound means that there is no such event, dead letter, watcher, slot or collection.
	ErrNotFound = errors.New("not found")

	// ErrConflict means that the current state does not permit the action, such as a second requeue of a dead letter.
	ErrConflict = errors.New("the current state does not permit it")

	// ErrForbidden means that the user of MongoDB lacks a privilege.
	ErrForbidden = errors.New("a privilege is missing")

	// ErrUnavailable means that MongoDB did not respond or failed. The completed part of an action is kept, and the same call does
	// the rest.
	ErrUnavailable = errors.New("MongoDB is not available")
)

// kinds are the errors for callers by the kind of failure.
var kinds = map[admin.Failure]error{
	admin.FailInvalid:     ErrInvalid,
	admin.FailNotFound:    ErrNotFound,
	admin.FailConflict:    ErrConflict,
	admin.FailChanged:     ErrConflict,
	admin.FailForbidden:   ErrForbidden,
	admin.FailUnavailable: ErrUnavailable,
}

// failure is an error of a use case with its kind.
type failure struct {
	kind  error
	cause error
	text  string
}

func (f *failure) Error() string { return f.text }

// Unwrap returns the kind and the cause.
func (f *failure) Unwrap() []error { return []error{f.kind, f.cause} }

// explain returns err with its kind, and what failed. It returns nil for nil.
func explain(doing string, err error) error {
	if err == nil {
		return nil
	}
	kind, _ := admin.Explain(err)
	return &failure{kinds[kind], err, "operate: cannot " + doing + ": " + err.Error()}
}

package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/pkg/event"
)

// Validator checks a body, which is nil for a tombstone, and returns its problems. Its error is
// written to dead letters and logs, so it must not quote the body. If it joins several errors, each
// of them is one problem.
type Validator func(ctx context.Context, typ string, body []byte) error

// Validation checks bodies by type, before events are stored and before messages are handled. Its
// errors are *InvalidError. The default policy makes such a message a dead letter at once, because
// another attempt would fail in the same way.
//
// A validator is a function, so any schema library can be used: compile the schema once and call it
// in the function.
type Validation struct {
	byType map[string]Validator
	strict bool
}

// NewValidation returns a Validation with a validator for each exact type. The validator of "*" is
// for all other types.
func NewValidation(byType map[string]Validator) (*Validation, error) {
	for typ, v := range byType {
		if v == nil {
			return nil, fmt.Errorf("%w: the validator of %q is nil", ErrConfiguration, typ)
		}
	}
	return &Validation{byType: maps.Clone(byType)}, nil
}

// Strict returns a copy of v that rejects types without a validator.
func (v *Validation) Strict() *Validation { return &Validation{byType: v.byType, strict: true} }

// Middleware returns a middleware that checks messages before they are handled. Place it inside
// Decrypt and ClaimCheckIn.
func (v *Validation) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			if err := v.checkBody(ctx, m.ID, m.Name, m.Value); err != nil {
				return err
			}
			return next.Handle(ctx, m)
		})
	}
}

// Emit returns a middleware that checks events before they are stored. Place it outside Encrypt and
// ClaimCheckOut.
func (v *Validation) Emit() EmitMiddleware {
	return func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			body, err := ev.Payload()
			if err == nil {
				err = v.checkBody(ctx, ev.ID().String(), ev.Name(), body)
			}
			if err != nil {
				return err
			}
			return next(ctx, ev)
		}
	}
}

// checkBody returns an *InvalidError if the validator of typ rejects body.
func (v *Validation) checkBody(ctx context.Context, id, typ string, body []byte) error {
	f, ok := v.byType[typ]
	if !ok {
		f, ok = v.byType["*"]
	}

	if !ok && v.strict {
		problem := fmt.Sprintf("no validator for this type: there are validators for %q", slices.Sorted(maps.Keys(v.byType)))
		return &InvalidError{ID: id, Type: typ, Problems: []string{problem}}
	}
	if !ok {
		return nil
	}

	if err := f(ctx, typ, body); err != nil {
		return &InvalidError{ID: id, Type: typ, Problems: listProblems(err), Err: err}
	}
	return nil
}

// listProblems returns the texts of the errors that err joins, or its own text.
func listProblems(err error) []string {
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return []string{clip(err.Error(), maxReason)}
	}

	var out []string
	for _, e := range joined.Unwrap() {
		out = append(out, clip(e.Error(), maxReason))
	}
	return out
}

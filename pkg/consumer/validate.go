package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/pkg/event"
)

// Validator looks at a body, which is nil for a tombstone, and says what is wrong with it. What it returns ends up in dead
// letters and logs: it must not quote the body. An error that joins several is several problems.
type Validator func(ctx context.Context, typ string, body []byte) error

// Validation checks bodies by type, before events are stored and before messages are handled. An error is an *InvalidError,
// which the default policy makes a dead letter of at once, since another attempt would end the same way.
//
// A validator is a function, so any library of schemas fits: compile the schema once and call it here.
type Validation struct {
	byType map[string]Validator
	strict bool
}

// NewValidation makes a Validation of validators by exact type; that of "*" is for types that have none.
func NewValidation(byType map[string]Validator) (*Validation, error) {
	for typ, v := range byType {
		if v == nil {
			return nil, fmt.Errorf("%w: the validator of %q is nil", ErrConfiguration, typ)
		}
	}
	return &Validation{byType: maps.Clone(byType)}, nil
}

// Strict is a Validation that refuses types without a validator.
func (v *Validation) Strict() *Validation { return &Validation{byType: v.byType, strict: true} }

// Middleware checks messages before they are handled. It goes inside of Decrypt and ClaimCheckIn.
func (v *Validation) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			if err := v.checkBody(ctx, m.ID, m.Type, m.Value); err != nil {
				return err
			}
			return next.Handle(ctx, m)
		})
	}
}

// Emit checks events before they are stored. It goes outside of Encrypt and ClaimCheckOut.
func (v *Validation) Emit() EmitMiddleware {
	return func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			body, err := ev.Payload()
			if err == nil {
				err = v.checkBody(ctx, ev.ID().String(), ev.Type(), body)
			}
			if err != nil {
				return err
			}
			return next(ctx, ev)
		}
	}
}

func (v *Validation) checkBody(ctx context.Context, id, typ string, body []byte) error {
	f, ok := v.byType[typ]
	if !ok {
		f, ok = v.byType["*"]
	}
	switch {
	case ok:
		if err := f(ctx, typ, body); err != nil {
			return &InvalidError{ID: id, Type: typ, Problems: listProblems(err), Err: err}
		}
	case v.strict:
		return &InvalidError{ID: id, Type: typ, Problems: []string{"nobody validates this type; it has one of " + fmt.Sprintf("%q", slices.Sorted(maps.Keys(v.byType)))}}
	}
	return nil
}

// listProblems is the texts of joined errors, or of the one.
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

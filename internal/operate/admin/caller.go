package admin

import "context"

// Caller is the sender of a request to the page, as authenticated by the listener.
type Caller struct {
	Actor    Actor
	Role     string // viewer or operator
	Payloads bool   // may read payloads
}

// The roles.
const (
	RoleViewer   = "viewer"
	RoleOperator = "operator"
)

// Operator reports whether the caller may change something.
func (c Caller) Operator() bool { return c.Role == RoleOperator }

type callerKey struct{}

// WithCaller returns a context that contains the caller.
func WithCaller(ctx context.Context, caller Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, caller)
}

// CallerOf returns the caller in ctx, and reports whether the listener has set one.
func CallerOf(ctx context.Context) (Caller, bool) {
	caller, ok := ctx.Value(callerKey{}).(Caller)
	return caller, ok
}

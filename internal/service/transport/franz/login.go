package franz

import (
	"context"

	franz "github.com/twmb/franz-go/pkg/sasl"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// mechanism is a login as franz-go starts it.
type mechanism struct{ *sasl.Login }

// Authenticate implements franz-go's Mechanism.
func (m mechanism) Authenticate(ctx context.Context, _ string) (franz.Session, []byte, error) {
	state, first, err := m.Start(ctx)
	return session{ctx, state}, first, err
}

// session is the exchange of one connection.
type session struct {
	ctx   context.Context
	state sasl.Session
}

// Challenge implements franz-go's Session.
func (s session) Challenge(challenge []byte) (done bool, response []byte, err error) {
	return s.state.Next(s.ctx, challenge)
}

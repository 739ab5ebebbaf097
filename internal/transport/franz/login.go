package franz

import (
	"context"
	"strings"

	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/outrelay/outrelay/internal/transport"
)

// mechanism returns a login that transport.Config has checked, or nil if there is none.
func mechanism(s *transport.SASL) sasl.Mechanism {
	if s == nil {
		return nil
	}

	switch strings.ToLower(s.Mechanism) {
	case "scram-sha-256":
		return scram.Auth{User: s.Username, Pass: s.Password}.AsSha256Mechanism()
	case "scram-sha-512":
		return scram.Auth{User: s.Username, Pass: s.Password}.AsSha512Mechanism()
	case "oauthbearer":
		return oauth.Oauth(func(ctx context.Context) (oauth.Auth, error) {
			token, err := s.Token(ctx)
			return oauth.Auth{Token: token, Extensions: s.Extensions}, err
		})
	default:
		return plain.Auth{User: s.Username, Pass: s.Password}.AsMechanism()
	}
}

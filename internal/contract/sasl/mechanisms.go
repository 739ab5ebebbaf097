// Package sasl has the mechanisms with which clients log in to Kafka. The table in this file is their only list: the configuration and
// its schema, the options of consumers, the diagnosis of logins, both transports and the servers of tests read it. To add a mechanism,
// add a row and the function that starts it.
package sasl

import (
	"context"
	"slices"
	"strings"

	"github.com/segmentio/kafka-go/sasl/scram"
)

// Credential is the proof of a user that a mechanism sends.
type Credential int

// The credentials. The set is closed.
const (
	Password Credential = iota // a user name and a password
	Token                      // a bearer token of a source that the user selects
	AWS                        // a bearer token that is signed with the credentials of AWS for a region
)

// Names of mechanisms that code selects itself.
const (
	OAuth = "oauthbearer"
	MSK   = "aws_msk_iam"
)

// wireOAuth is the name of RFC 7628 for a bearer token.
const wireOAuth = "OAUTHBEARER"

// Mechanism is one way to log in.
type Mechanism struct {
	Name       string // in the configuration and in the options of consumers
	Listener   string // the name by which listeners offer it
	Credential Credential
	Clear      bool   // the credential is sent as it is, so a connection without TLS shows it
	JavaModule string // the class of Kafka's own clients and brokers, below org.apache.kafka.common.security; empty: none
	Fixes      Fixes

	wire  string // the name that the client requests; empty: Listener
	start func(ctx context.Context, l *Login) (Session, []byte, error)
}

// Fixes has the fixes for a token that is missing, and for one that the broker rejects.
type Fixes struct{ Missing, Rejected string }

// mechanisms is the table, in the order in which users read the names.
var mechanisms = []Mechanism{
	{Name: "plain", Listener: "PLAIN", Credential: Password, Clear: true, JavaModule: "plain.PlainLoginModule", start: startPlain},
	{Name: "scram-sha-256", Listener: "SCRAM-SHA-256", Credential: Password, JavaModule: "scram.ScramLoginModule", start: startScram(scram.SHA256)},
	{Name: "scram-sha-512", Listener: "SCRAM-SHA-512", Credential: Password, JavaModule: "scram.ScramLoginModule", start: startScram(scram.SHA512)},
	{
		Name: OAuth, Listener: wireOAuth, Credential: Token, Clear: true, JavaModule: "oauthbearer.OAuthBearerLoginModule", start: startToken,
		Fixes: Fixes{
			Missing:  "correct kafka.sasl.token, or the file, program or server that supplies the token",
			Rejected: "check that the token is for this cluster and has not expired (issuer, audience and scope), and this machine's clock",
		},
	},
	// Brokers of MSK accept the signed request as a bearer token.
	{
		Name: MSK, Listener: "AWS_MSK_IAM", Credential: AWS, Clear: true, wire: wireOAuth, start: startToken,
		Fixes: Fixes{
			Missing: "supply credentials of AWS: environment, profile, or the role of the pod or machine",
			Rejected: "use the port of the brokers for IAM (9098), set kafka.sasl.region to their region, and give the role the policy " +
				"that `outrelay roles --only msk` prints; check this machine's clock as well",
		},
	},
}

// Find returns the mechanism with a name of the configuration or of a listener, in any case.
func Find(name string) (Mechanism, bool) {
	i := slices.IndexFunc(mechanisms, func(mechanism Mechanism) bool {
		return strings.EqualFold(mechanism.Name, name) || strings.EqualFold(mechanism.Listener, name)
	})
	if i < 0 {
		return Mechanism{}, false
	}
	return mechanisms[i], true
}

// With returns the mechanisms with one of these credentials, or all of them without an argument.
func With(credentials ...Credential) []Mechanism {
	return slices.DeleteFunc(slices.Clone(mechanisms), func(mechanism Mechanism) bool {
		return len(credentials) > 0 && !slices.Contains(credentials, mechanism.Credential)
	})
}

// Names returns the names of With, for the configuration and for texts.
func Names(credentials ...Credential) []string {
	var names []string
	for _, m := range With(credentials...) {
		names = append(names, m.Name)
	}
	return names
}

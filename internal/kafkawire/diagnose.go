package kafkawire

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

// Diagnosis explains why Kafka cannot be used: what happened, how the client tried to connect, and
// the fix.
type Diagnosis struct {
	Broker string
	Tried  string
	Text   string
	Fix    string
	Err    error
}

func (d *Diagnosis) Error() string {
	return fmt.Sprintf("kafka: %s: %s (tried %s); %s", d.Broker, d.Text, d.Tried, d.Fix)
}

// Unwrap returns the cause.
func (d *Diagnosis) Unwrap() error { return d.Err }

// Rejected reports whether the broker rejects the user, the password or the mechanism. The same attempt fails again. A
// rejected token does not count: its source may supply another one.
func (d *Diagnosis) Rejected() bool {
	if _, token := errors.AsType[*sasl.RejectedTokenError](d.Err); token {
		return false
	}
	_, mechanism := errors.AsType[*mechanismError](d.Err)
	return mechanism || errors.Is(d.Err, kafkago.SASLAuthenticationFailed) || errors.Is(d.Err, kafkago.IllegalSASLState)
}

// Diagnose connects to the configured brokers, and then to the addresses that they advertise. It
// returns nil as soon as one broker of each kind responds: a broker that is down is not a mistake in
// the configuration. Otherwise the error is a *Diagnosis, or several of them joined.
func (c *Client) Diagnose(ctx context.Context) error {
	var errs []error
	for _, addr := range c.cfg.Brokers {
		response, err := c.probeBroker(ctx, addr)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			errs = append(errs, c.explainError(addr, err))
			continue
		}

		return c.checkAdvertised(ctx, addr, parseLayout(response))
	}
	return errors.Join(errs...)
}

// checkAdvertised connects to the brokers in layout, which the broker at from has advertised. It returns nil
// as soon as one connection succeeds, and then keeps layout as the layout.
func (c *Client) checkAdvertised(ctx context.Context, from string, layout *Layout) error {
	var errs []error
	for id, addr := range layout.Brokers {
		link, err := c.Dial(ctx, addr)
		if err == nil {
			link.Close()
			c.layout.Store(layout)
			return nil
		}

		diagnosis := c.explainError(addr, err)
		diagnosis.Text = fmt.Sprintf("%s responds, but advertises this address for broker %d, "+
			"which cannot be reached from this machine: %s", from, id, diagnosis.Text)
		diagnosis.Fix = "correct advertised.listeners of the brokers, or make the name and port reachable from this machine"
		errs = append(errs, diagnosis)
	}
	return errors.Join(errs...)
}

// probeBroker connects to addr and sends one request that needs authentication.
func (c *Client) probeBroker(ctx context.Context, addr string) (*metadata.Response, error) {
	link, err := c.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	defer link.Close()

	var message protocol.Message
	err = link.exchange(ctx, adminTimeout, func(link *Link) error {
		// An empty list requests the brokers only. A nil list would request all topics.
		message, err = link.protoConn.RoundTrip(&metadata.Request{TopicNames: []string{}})
		return err
	})
	if err != nil {
		return nil, &connectError{addr, stageRequest, err}
	}
	return message.(*metadata.Response), nil
}

// connectionMethod describes how the client connects, without secrets.
func (c *Client) connectionMethod() string {
	method := "plain text"
	if c.cfg.CurrentTLS != nil {
		method = "TLS"
	}
	if c.cfg.SASL == nil {
		return method + " without SASL"
	}
	method += ", SASL " + c.cfg.SASL.Name()
	if user := c.cfg.SASL.User; user != "" {
		method += fmt.Sprintf(" as %q", user)
	}
	return method
}

// explainError returns the *Diagnosis of a connection that failed with err.
func (c *Client) explainError(addr string, err error) *Diagnosis {
	diagnosis := &Diagnosis{Broker: addr, Tried: c.connectionMethod(), Err: err}
	at := stageRequest
	if ce, ok := errors.AsType[*connectError](err); ok {
		at = ce.stage
	}

	switch at {
	case stageTCP:
		diagnosis.Text, diagnosis.Fix = explainTCP(err)
	case stageTLS:
		diagnosis.Text, diagnosis.Fix = explainTLS(err)
	case stageSASL:
		diagnosis.Text, diagnosis.Fix = c.explainSASL(err)
	case stageVersions, stageRequest:
		diagnosis.Text, diagnosis.Fix = c.explainResponse(at, err)
	}
	return diagnosis
}

func explainTCP(err error) (text, fix string) {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return fmt.Sprintf("the name %q cannot be resolved", dns.Name),
			"correct kafka.brokers, or the name service of this machine"
	}

	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "the connection is refused: no process listens on this port",
			"correct host and port in kafka.brokers, or start the broker"

	case isTimeout(err) || errors.Is(err, context.DeadlineExceeded):
		return "no response in time",
			"correct kafka.brokers, or open the way through firewalls and network policies"

	default:
		return "no connection: " + err.Error(),
			"correct kafka.brokers, or the network between this machine and the broker"
	}
}

func explainTLS(err error) (text, fix string) {
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return "this machine does not trust the authority that signed the broker's certificate",
			"set kafka.tls.ca to the certificate of that authority"
	}
	if hostnameErr, ok := errors.AsType[x509.HostnameError](err); ok {
		return fmt.Sprintf("the broker's certificate is not valid for the name %q", hostnameErr.Host),
			"use a name of the certificate in kafka.brokers, or issue a certificate for this name"
	}
	if _, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		return "the broker's certificate is not valid: " + err.Error(),
			"renew it, or correct this machine's clock"
	}

	// A plain text listener takes the handshake for a request of impossible size, and closes the connection.
	_, notTLS := errors.AsType[tls.RecordHeaderError](err)
	if notTLS || ClosedByBroker(err) {
		return "the listener does not support TLS",
			"remove kafka.tls, or use the port of the broker's TLS listener"
	}
	if isTLSAlert(err) {
		return "the broker rejects the handshake: " + err.Error(),
			"set kafka.tls.cert and kafka.tls.key to a certificate that the broker trusts"
	}
	return "the TLS handshake fails: " + err.Error(), "check kafka.tls against the broker's listener"
}

func (c *Client) explainSASL(err error) (text, fix string) {
	if mechanismErr, ok := errors.AsType[*mechanismError](err); ok {
		return "the listener does not offer SASL " + mechanismErr.wanted, mechanismErr.describeFix()
	}

	if tokenError, ok := errors.AsType[*sasl.TokenError](err); ok {
		return "there is no token to log in with: " + tokenError.Err.Error(),
			c.cfg.SASL.Fixes().Missing
	}
	if rejectedTokenError, ok := errors.AsType[*sasl.RejectedTokenError](err); ok {
		return rejectedTokenError.Error(), c.cfg.SASL.Fixes().Rejected
	}

	switch {
	case errors.Is(err, kafkago.SASLAuthenticationFailed):
		return "user or password is wrong",
			"correct kafka.sasl.username and kafka.sasl.password"

	// A listener without SASL closes the connection at the first request of the login.
	case errors.Is(err, kafkago.IllegalSASLState) || ClosedByBroker(err):
		return "the listener does not accept SASL",
			"remove kafka.sasl, or use the port of the broker's SASL listener"

	default:
		return "the authentication fails: " + err.Error(),
			"check kafka.sasl against the broker's listener"
	}
}

// describeFix returns what to do, in the words of the configuration.
func (e *mechanismError) describeFix() string {
	var usable []string
	for _, name := range e.offered {
		if mechanism, ok := sasl.Find(name); ok {
			usable = append(usable, mechanism.Name)
		}
	}

	other := "use the port of a listener with SASL " + e.wanted
	switch {
	case len(usable) > 0:
		slices.Sort(usable)
		return "set kafka.sasl.mechanism to " + strings.Join(usable, " or ") + ", which the listener offers, or " + other
	case len(e.offered) > 0:
		return fmt.Sprintf("%s: this listener offers only %s, which outrelay does not support", other, strings.Join(e.offered, ", "))
	}
	return "remove kafka.sasl, or " + other
}

// explainResponse explains an error at a request. Kafka closes the connection if the listener uses another
// protocol than the client.
func (c *Client) explainResponse(failedStage stage, err error) (text, fix string) {
	switch {
	// With TLS 1.3 the client has finished before the broker checks its certificate.
	case isTLSAlert(err):
		return "the broker wants a client certificate: " + err.Error(),
			"set kafka.tls.cert and kafka.tls.key to a certificate that the broker trusts"

	case errors.Is(err, response.ErrTLS) || failedStage == stageVersions && c.cfg.CurrentTLS == nil && ClosedByBroker(err):
		return "the listener closes a plain text connection: it expects TLS",
			"set kafka.tls, or use the port of the broker's plain text listener"

	case ClosedByBroker(err) && c.cfg.SASL == nil:
		return "the listener closes the connection after a request without authentication",
			"set kafka.sasl, or use the port of a listener without SASL"

	case isTimeout(err):
		return "the listener accepts connections and does not respond",
			"check the broker: it may hang, or another service uses this port; " +
				"if the listener expects TLS, set kafka.tls"

	default:
		return "the listener does not respond like a Kafka broker: " + err.Error(),
			"check that kafka.brokers names Kafka, 0.11 or later"
	}
}

// isTLSAlert reports whether the peer ended TLS with an alert.
func isTLSAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error"
}

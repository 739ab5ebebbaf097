package config

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// leastToken is the fewest characters of a token: shorter ones can be guessed within the rate that is allowed.
const leastToken = 12

var (
	// redactPath is what internal/admin reads as a path.
	redactPath = regexp.MustCompile(`^\$(?:\.\.?[A-Za-z0-9_-]+|\[(?:\*|[0-9]{1,9})\])+$`)
	headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
)

func (c *Config) validateAdmin(v validator) {
	a := c.HTTP.Admin
	if a == nil {
		return
	}
	at := func(name string) string { return "http.admin." + name }
	same := a.Listen == c.HTTP.Listen && !strings.HasSuffix(a.Listen, ":0")
	v.check(at("listen"), hostPort(a.Listen) && !same, strconv.Quote(a.Listen), "expected host:port, other than http.listen")
	for _, t := range []struct {
		name  string
		token Secret
	}{{"token", a.Token}, {"viewer_token", a.ViewerToken}} {
		v.check(at(t.name), t.token.IsZero() || len(t.token.Reveal()) >= leastToken, "a token that is too short", fmt.Sprintf("expected at least %d characters, such as openssl rand -hex 32 makes", leastToken))
	}
	v.check(at("viewer_token"), a.ViewerToken.IsZero() || a.ViewerToken.Reveal() != a.Token.Reveal(), "the same as token", "expected another one: the role follows from it")
	for _, one := range a.TLS.problems() {
		v.add(at("tls."+one.Path), one.Found, one.Allowed)
	}
	a.Proxy.validate(v, at("proxy."))
	v.check(at("anonymous"), a.Anonymous == "none" || a.Local(), a.Anonymous, "only an address of this machine may be open to everybody; set up token, tls.client_ca or proxy")
	known := !a.Token.IsZero() || !a.ViewerToken.IsZero() || a.Proxy != nil || a.TLS != nil && a.TLS.ClientCA != ""
	if !known && a.Anonymous == "none" && !v.has(at("token")) {
		v.add("http.admin", "nobody could log in", "give token (best as ${file:/path}), tls.client_ca or proxy, or on an address of this machine anonymous: viewer")
	}
	for i, name := range a.Operators {
		_, err := path.Match(name, "")
		v.check(fmt.Sprintf("%s[%d]", at("operators"), i), err == nil && name != "", strconv.Quote(name), "expected a name, in which * and ? may stand")
	}
	for i, p := range a.Redact.Paths {
		v.check(fmt.Sprintf("%s[%d]", at("redact.paths"), i), redactPath.MatchString(p), strconv.Quote(p), "expected a path such as $.card.number, $.items[*].price or $..password")
	}
	for i, h := range a.Redact.Headers {
		_, err := path.Match(h, "")
		v.check(fmt.Sprintf("%s[%d]", at("redact.headers"), i), err == nil && h != "", strconv.Quote(h), "expected the name of a header, in which * and ? may stand")
	}
	v.number(at("rate"), a.Rate, 1, 10_000)
}

func (p *Proxy) validate(v validator, prefix string) {
	if p == nil {
		return
	}
	v.required(prefix+"header", p.Header == "", "name the header in which the proxy says who calls")
	v.check(prefix+"header", p.Header == "" || headerName.MatchString(p.Header) && http.CanonicalHeaderKey(p.Header) != "Authorization", strconv.Quote(p.Header), "expected the name of a header, such as X-Forwarded-User")
	for i, from := range p.From {
		_, err := ParseNetwork(from)
		v.check(fmt.Sprintf("%sfrom[%d]", prefix, i), err == nil, strconv.Quote(from), "expected an address or a network, such as 10.1.2.3 or 10.1.0.0/16")
	}
}

// Networks are those of From, or the default.
func (p *Proxy) Networks() []netip.Prefix {
	from := p.From
	if len(from) == 0 {
		from = []string{"127.0.0.0/8", "::1/128"}
	}
	var out []netip.Prefix
	for _, text := range from {
		if n, err := ParseNetwork(text); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// ParseNetwork reads an address or a network.
func ParseNetwork(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}

// Local reports whether only this machine can reach the listener.
func (a *Admin) Local() bool {
	host, _, err := net.SplitHostPort(a.Listen)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}

func (a *Admin) warnings() (w []string) {
	if a == nil {
		return nil
	}
	if !a.Local() && a.TLS == nil && (!a.Token.IsZero() || !a.ViewerToken.IsZero()) {
		w = append(w, "http.admin.listen is reachable from other machines without http.admin.tls: tokens cross the network in the clear unless a proxy in front ends TLS")
	}
	return w
}

// Server is the configuration of a TLS server, its files read now. It is nil for a nil ServerTLS.
func (t *ServerTLS) Server() (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	if list := t.problems(); len(list) > 0 {
		return nil, &Problems{list}
	}
	pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, err
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	if t.ClientCA != "" {
		pem, err := os.ReadFile(t.ClientCA)
		if err != nil {
			return nil, err
		}
		c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.VerifyClientCertIfGiven
		c.ClientCAs.AppendCertsFromPEM(pem)
	}
	return c, nil
}

func (t *ServerTLS) problems() (list []Problem) {
	if t == nil {
		return nil
	}
	if t.Cert == "" {
		list = append(list, Problem{"cert", "required and not set", "give the file with the certificate"})
	}
	if t.Key == "" {
		list = append(list, Problem{"key", "required and not set", "give the file with the private key"})
	}
	pair := &TLS{CA: t.ClientCA}
	if len(list) == 0 {
		pair.Cert, pair.Key = t.Cert, t.Key
	}
	for _, one := range pair.problems() {
		if one.Path == "ca" {
			one.Path = "client_ca"
		}
		list = append(list, one)
	}
	return list
}

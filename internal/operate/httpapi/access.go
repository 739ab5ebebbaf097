package httpapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/probes"
)

const maxActor = 128 // bytes of a name in the audit log

// identify returns the caller that sent request, or the reason why request has no valid login. A name from the
// proxy takes precedence, because the proxy may connect with a certificate of its own.
func (a *Access) identify(request *http.Request) (caller admin.Caller, problem string) {
	if a.Identify != nil {
		return a.identifyByService(request)
	}
	if a.isProxy(request) {
		names := request.Header.Values(a.ProxyHeader)
		// With several names, one of them may come from the client.
		if len(names) == 1 && names[0] != "" {
			return a.newCaller(request, names[0], "proxy", a.roleOf(names[0]))
		}
		if len(names) == 0 && request.Header.Get("Authorization") != "" {
			return a.identifyByToken(request)
		}

		// The certificate of the proxy does not identify the person who uses it.
		return admin.Caller{}, "the proxy did not name exactly one person in " + a.ProxyHeader
	}

	// A certificate counts before a token, because it cannot be typed by mistake.
	if name := certificateName(request); name != "" && !a.IgnoreCertificates {
		return a.newCaller(request, name, "certificate", a.roleOf(name))
	}
	if request.Header.Get("Authorization") != "" {
		return a.identifyByToken(request)
	}
	if caller, problem, ok := a.identifyBySession(request); ok {
		return caller, problem
	}
	// Anonymous access is a choice of the configuration, and comes last so that a login still names its person.
	if a.Anonymous == admin.RoleViewer || a.Anonymous == admin.RoleOperator {
		return a.newCaller(request, "anonymous", "anonymous", a.Anonymous)
	}
	return admin.Caller{}, "the request has no login"
}

// identifyByService returns the caller that the service in which the page is mounted has authorized.
func (a *Access) identifyByService(request *http.Request) (caller admin.Caller, problem string) {
	given, err := a.Identify(request)
	if err != nil {
		return admin.Caller{}, logging.Clean(err.Error())
	}
	if given.Role != admin.RoleViewer && given.Role != admin.RoleOperator {
		return admin.Caller{}, "the service gave " + strconv.Quote(given.Role) + " as the role; it must be viewer or operator"
	}

	caller, problem = a.newCaller(request, given.Actor.Name, "service", given.Role)
	caller.Payloads = given.Payloads
	return caller, problem
}

// newCaller returns the caller with a name that was proved by the given method.
func (a *Access) newCaller(request *http.Request, name, method, role string) (caller admin.Caller, problem string) {
	if !isPrintable(name) {
		return admin.Caller{}, "the name of the caller is empty, too long or not printable"
	}

	source := "page/" + method
	if isAPI(request) {
		source = "api/" + method
	}
	caller = admin.Caller{Actor: admin.Actor{Name: name, Source: source}, Role: role}
	caller.Payloads = a.Payloads == admin.RoleViewer || a.Payloads == admin.RoleOperator && caller.Operator()
	return caller, ""
}

func isPrintable(name string) bool {
	isControl := func(char rune) bool { return !unicode.IsPrint(char) }
	return name != "" && len(name) <= maxActor && utf8.ValidString(name) && !strings.ContainsFunc(name, isControl)
}

// roleOf returns the role of a name from a certificate or from the proxy.
func (a *Access) roleOf(name string) string {
	for _, p := range a.Operators {
		if ok, _ := path.Match(p, name); ok || p == name {
			return admin.RoleOperator
		}
	}
	return admin.RoleViewer
}

// isProxy reports whether the trusted proxy sends the request.
func (a *Access) isProxy(request *http.Request) bool {
	if a.ProxyHeader == "" {
		return false
	}
	from := remoteIP(request)
	return slices.ContainsFunc(a.ProxyFrom, func(prefix netip.Prefix) bool { return prefix.Contains(from) })
}

// clientName returns the name under which the requests of a caller are counted. A caller with a
// token or a session chooses its own name, so its role is used instead.
func clientName(request *http.Request, caller admin.Caller) string {
	name := caller.Actor.Name
	if strings.HasSuffix(caller.Actor.Source, "/token") || strings.HasSuffix(caller.Actor.Source, "/session") {
		name = caller.Role
	}
	return remoteIP(request).String() + " " + caller.Actor.Source + " " + name
}

// certificateName returns the common name of a verified client certificate, or "".
func certificateName(request *http.Request) string {
	if request.TLS == nil || len(request.TLS.VerifiedChains) == 0 {
		return ""
	}
	return request.TLS.VerifiedChains[0][0].Subject.CommonName
}

// identifyByToken identifies a caller by its token. With a browser's login, the person chooses the
// user name.
func (a *Access) identifyByToken(request *http.Request) (caller admin.Caller, problem string) {
	name, token, ok := request.BasicAuth()
	if !ok {
		var scheme string
		scheme, token, ok = strings.Cut(request.Header.Get("Authorization"), " ")
		ok = ok && strings.EqualFold(scheme, "Bearer")
		token = strings.TrimSpace(token)
	}
	// A bearer token comes without a user name.
	if name == "" {
		name = "token"
	}

	if role := a.Tokens().roleOf(token); ok && role != "" {
		return a.newCaller(request, name, "token", role)
	}
	return admin.Caller{}, "the token is not one of this listener's"
}

// equalTokens compares hashes, so that the time does not reveal the length of the token either.
func equalTokens(got, token string) bool {
	gotSum, tokenSum := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(gotSum[:], tokenSum[:]) == 1 && token != ""
}

// allowsHost reports whether a request may use that host name. A web page can make its own host name
// resolve to this machine. Its requests then come from this machine and have the same origin.
func (a *Access) allowsHost(host string) bool {
	if !a.Local {
		return true
	}

	name := probes.HostName(host)
	isName := func(known string) bool { return strings.EqualFold(known, name) }
	if name == "localhost" || slices.ContainsFunc(a.Hosts, isName) {
		return true
	}
	addr, err := netip.ParseAddr(name)
	return err == nil && addr.IsLoopback()
}

// remoteIP returns the address of the connection, or the zero value if it has none.
func remoteIP(request *http.Request) netip.Addr {
	at, err := netip.ParseAddrPort(request.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return at.Addr().Unmap().WithZone("")
}

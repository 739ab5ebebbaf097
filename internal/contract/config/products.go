package config

import (
	"net/url"
	"strings"
)

// otherProducts are servers that speak the protocol of MongoDB, by the end of their host names, and lack features that the
// relay needs: change streams with startAfter and tokens after each batch, transactions over several collections, and the
// oplog.
var otherProducts = map[string]string{
	".docdb.amazonaws.com":         "Amazon DocumentDB",
	".docdb-elastic.amazonaws.com": "Amazon DocumentDB elastic clusters",
	".cosmos.azure.com":            "Azure Cosmos DB",
	".cosmos.azure.cn":             "Azure Cosmos DB",
}

// findOtherProduct returns the name of the product in a connection string if it is not MongoDB, and otherwise "".
func findOtherProduct(uri URI) string {
	address, _ := uri.withoutLogin()
	parsed, err := url.Parse(address)
	hosts := address
	if err == nil {
		hosts = parsed.Host
	}

	for _, host := range strings.Split(hosts, ",") {
		name, _, _ := strings.Cut(host, ":")
		for suffix, product := range otherProducts {
			if strings.HasSuffix(strings.ToLower(name), suffix) {
				return product
			}
		}
	}
	return ""
}

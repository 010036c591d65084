// SPDX-License-Identifier: Apache-2.0

package hosts

import "slices"

// Profiles are all hosts that are tested.
var Profiles = slices.Concat(podProfiles, pluginProfiles, tunnelProfiles, overlayProfiles, cardProfiles, firewallProfiles, meshProfiles)

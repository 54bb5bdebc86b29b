variable "run" {
  description = "Name of this pair of hosts; the tag `run` of everything made."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9-]{1,40}$", var.run))
    error_message = "Small letters, digits and hyphens, at most 40."
  }
}

variable "expiry" {
  description = "When the hosts power themselves off, RFC 3339 in UTC; the tag `expiry`. For whoever finds them: the hosts count ttl_minutes."
  type        = string
}

variable "ttl_minutes" {
  description = "Minutes from first boot until a host powers itself off, which terminates it."
  type        = number
  validation {
    condition     = var.ttl_minutes >= 15 && var.ttl_minutes <= 1440
    error_message = "From 15 minutes, which the set-up of a host takes, to a day."
  }
}

variable "public_key" {
  description = "Public half of the run's SSH key; the private half never gets here."
  type        = string
}

variable "allow_cidr" {
  description = "The only addresses that reach SSH, such as 203.0.113.7/32."
  type        = string
  validation {
    condition     = can(cidrhost(var.allow_cidr, 0)) && !strcontains(var.allow_cidr, ":") && !endswith(var.allow_cidr, "/0")
    error_message = "An IPv4 range in CIDR form, and not the whole internet."
  }
}

variable "region" {
  description = "Region of the provider."
  type        = string
  default     = "eu-central-1"
}

variable "zone" {
  description = "Availability zone of both hosts; empty: the first that has both instance types."
  type        = string
  default     = ""
}

variable "client_type" {
  description = "Instance type of the load generator: c7g.large (Graviton3), c7i.large (Sapphire Rapids), c6a.large (EPYC)."
  type        = string
  default     = "c7g.large"
}

variable "server_type" {
  description = "Instance type of the server; as client_type."
  type        = string
  default     = "c7g.large"
}

variable "spot" {
  description = "Spot instances, which are cheaper and can be taken away; false: on demand."
  type        = bool
  default     = true
}

variable "placement_group" {
  description = "A cluster placement group: short, steady ways between the hosts, at some risk of no capacity."
  type        = bool
  default     = true
}

variable "mock_endpoint" {
  description = "URL of a mock cloud that takes the provider's place; empty: the real one."
  type        = string
  default     = ""
}
